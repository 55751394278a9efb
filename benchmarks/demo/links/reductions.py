"""The gradient reductions of a rank: on the link of the all-to-alls, and timed."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from megatron.core.distributed import param_and_grad_buffer

from benchmarks.demo.links.paced import PacedWire
from megatron_lancet.patching import around

_BUCKETS = param_and_grad_buffer._ParamAndGradBucketGroup


class Reductions:
    """Times the waits for Megatron's gradient reductions; on a paced link it also holds them back.

    Where the kernel caps the rate of a link, reductions take it because Megatron's process groups are made on it.
    """

    def __init__(self, wire: PacedWire | None) -> None:
        """
        Args:
            wire: the paced link; None where the kernel caps the rate.
        """
        self._wire = wire
        self._held: dict[Any, Future[None]] = {}
        self._waited_ms = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the reductions of Megatron's DDP are timed, and held back on a paced link."""
        with around(_BUCKETS, "start_grad_sync", self._start), around(_BUCKETS, "finish_grad_sync", self._finish):
            yield

    def take_waited_ms(self) -> float:
        """How long this rank has waited for reductions since the last call."""
        waited_ms, self._waited_ms = self._waited_ms, 0.0
        return waited_ms

    def _start(self, stock: Callable[..., None], buckets: Any, *args: Any, **kwargs: Any) -> None:
        if self._wire is not None and buckets.grad_reduce_handle is None:
            _, self._held[buckets] = self._wire.send(reduced_bytes(buckets), lambda: None)
        stock(buckets, *args, **kwargs)

    def _finish(self, stock: Callable[..., None], buckets: Any, *args: Any, **kwargs: Any) -> None:
        start_s = time.perf_counter()
        stock(buckets, *args, **kwargs)  # starts the reduction, too, without --overlap-grad-reduce
        held = self._held.pop(buckets, None)
        if held is not None:
            held.result()
        self._waited_ms += (time.perf_counter() - start_s) * 1e3


def reduced_bytes(buckets: Any) -> int:
    """Bytes that leave a rank in the reduction of a group of buckets, which goes around a ring."""
    is_sharded = buckets.ddp_config.use_distributed_optimizer
    group = buckets.intra_distributed_optimizer_instance_group if is_sharded else buckets.data_parallel_group
    num_ranks, rounds = group.size(), 1 if is_sharded else 2  # a reduce-scatter, and an all-gather behind it
    return sum(rounds * bucket.grad_data.nbytes * (num_ranks - 1) // num_ranks for bucket in buckets.buckets)
