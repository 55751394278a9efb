"""Counts the activations that each op keeps from forward to backward."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lancet.runtime.trace import Trace
from megatron_lancet.runtime.trace_log import What


class SavedActivations:
    """Counts what autograd saves in a step, each storage once, at the op that saves it first.

    Tensors that a recomputed segment saves are not seen. Weights don't count.
    """

    def __init__(self, trace: Trace, weights: Iterable[torch.Tensor]) -> None:
        """
        Args:
            trace: trace of the same step; its entries give the current op.
            weights: parameters of the model, which are not activations.
        """
        self._trace = trace
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._live: dict[int, StorageWeakRef] = {}
        self._saved: list[tuple[int, int]] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what the step inside the context saves."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def bytes_by_op(self) -> dict[str, int]:
        """Returns bytes by op name, over all micro-batches of the step. Call before the trace's next step begins."""
        # A tensor belongs to the op whose end is logged next.
        ops: list[str] = []
        name = ""
        for entry in reversed(self._trace.log):
            if entry.what is What.END:
                name = entry.name
            elif entry.what is What.SKIP:
                name = ""
            ops.append(name)
        ops.reverse()
        found: defaultdict[str, int] = defaultdict(int)
        for position, num_bytes in self._saved:
            if position < len(ops) and ops[position]:
                found[ops[position]] += num_bytes
        return dict(found)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if storage.data_ptr() not in self._weights and (known is None or known.expired()):
            self._live[storage._cdata] = StorageWeakRef(storage)
            self._saved.append((len(self._trace.log), storage.nbytes()))
        return tensor
