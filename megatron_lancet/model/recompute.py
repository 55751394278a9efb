"""Recomputes parts of a layer in the backward pass, without a backward pass inside the backward pass.

Megatron's own checkpoints run one: there a weight's gradient would seem complete after each chunk, and a layer's
all-to-alls would run a second time. Here only saved tensors are made again and the graph stays as it is, so the
mirrored pipeline and the deferred dWs stay what they are, and no all-to-all is repeated.

There are two kinds. :func:`maybe_recomputed` keeps the inputs and the outputs of an op and drops what lies between
(torch's non-reentrant checkpoint). :class:`DroppedOutputs` keeps the inputs of a cheap function and drops its outputs
as well, although other functions save them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron_lancet.model.te.precision import recompute_precision

DROPS_OUTPUTS = frozenset({"layernorm", "moe_act", "mla_up_proj"})
"""Values of ``--recompute-modules`` whose outputs are dropped."""


@dataclass(frozen=True)
class Recompute:
    """The ops of a layer that are recomputed in the backward pass: all that lies between its collectives, or a part.

    What an op receives stays in memory: a layer's input, and the rows of the local experts.

    Attributes:
        attention: norms and attention, up to the router's input; in a multi-token prediction also its projection, in a
            layer without attention the norm alone.
        mlp: the MLP of a layer without experts.
        experts: the experts, from sorted rows to their outputs.
        shared_experts: the experts that see all tokens.
        experts_norm: the norm in front of the router and the experts, whose output is dropped.
        drops_outputs: whether Megatron's modules drop outputs of functions inside them.
    """

    attention: bool = False
    mlp: bool = False
    experts: bool = False
    shared_experts: bool = False
    experts_norm: bool = False
    drops_outputs: bool = False


NOTHING = Recompute()
_EVERYTHING = Recompute(attention=True, mlp=True, experts=True, shared_experts=True)


def recompute_of_layer(config: TransformerConfig, index_in_stage: int) -> Recompute:
    """Translates Megatron's settings for the layer with this index in its pipeline stage.

    The uniform method's groups of several layers are recomputed layer by layer: a segment ends at a collective anyway.
    """
    modules = config.recompute_modules or []
    if config.recompute_granularity == "full":
        everywhere = config.recompute_method != "block"
        return _EVERYTHING if everywhere or index_in_stage < (config.recompute_num_layers or 0) else NOTHING
    if config.recompute_granularity != "selective":
        return NOTHING
    moe = "moe" in modules
    return Recompute(
        mlp="mlp" in modules,
        experts=moe,
        shared_experts=moe or "shared_experts" in modules,
        experts_norm="layernorm" in modules,
        drops_outputs=not DROPS_OUTPUTS.isdisjoint(modules),
    )


def recompute_of_mtp(config: TransformerConfig) -> Recompute:
    """Translates Megatron's settings for a multi-token prediction, which stock's block method leaves out."""
    is_left_out = config.recompute_granularity == "full" and config.recompute_method == "block"
    return NOTHING if is_left_out else recompute_of_layer(config, 0)


def maybe_recomputed[T](again: bool, segment: Callable[..., T], *args: Any) -> T:
    """Returns ``segment(*args)``; with ``again``, saved tensors are dropped and recomputed in the backward pass.

    Args:
        segment: function without lasting effects; it draws the same random numbers when it runs again.
    """
    if not again:
        return segment(*args)
    # Transformer Engine before 2.12 restores its fp8 scales at the end of a module's forward, which torch would skip.
    return checkpoint(segment, *args, use_reentrant=False, context_fn=two_runs, early_stop=False)


def two_runs() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a function's first run, which follows, and of its second one, in the backward pass.

    In the second one it draws the same random numbers, and quantizes with the same scales.
    """
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = _copies(tracker.get_states())
    first, again_precision = recompute_precision()

    @contextmanager
    def with_first_states() -> Iterator[None]:
        now = tracker.get_states()
        tracker.set_states(states)
        try:
            with again_precision:
                yield
        finally:
            tracker.set_states(now)

    return first, with_first_states()


def _copies(states: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the random states of Megatron's tracker.

    With ``--te-rng-tracker`` or CUDA graphs they are generators, which advance on each draw; otherwise they are tensors
    that never change.
    """
    return {name: one.clone_state() if isinstance(one, torch.Generator) else one for name, one in states.items()}


class DroppedOutputs:
    """Runs a function, and keeps its inputs instead of its outputs and of what its own backward pass needs.

    Other functions may save the outputs for their backward pass. Those that do run inside :meth:`consumed`, where a
    note of what to recompute is saved in place of an output or a view of it. The first note that is read, or the first
    saved tensor of the function itself, makes the function run again, once.
    """

    def __init__(self) -> None:
        self._source: _Recomputed | None = None
        self._storages: Sequence[StorageWeakRef] = ()
        self._versions: Sequence[int] = ()

    def run[T](self, function: Callable[..., T], *inputs: Any) -> T:
        """Returns ``function(*inputs)``, a tensor or several; memory is freed when the caller drops the result.

        Args:
            function: draws no random numbers and has no lasting effects.
        """
        if not torch.is_grad_enabled():
            return function(*inputs)
        first, again = recompute_precision()
        source = self._source = _Recomputed(function, inputs, again)
        with first, saved_tensors_hooks(source.drop, source.saved):
            outputs = function(*inputs)
        # A storage that a weak reference names is not given to another tensor, so the addresses stay unique.
        self._storages = [StorageWeakRef(output.untyped_storage()) for output in _several(outputs)]
        self._versions = [output._version for output in _several(outputs)]
        return outputs

    def then[T](self, function: Callable[..., T], *inputs: Any) -> "tuple[T, DroppedOutputs]":
        """Runs a function of the outputs; its own outputs are dropped where these are.

        Returns:
            ``function(*inputs)``, and what drops it.
        """
        if self._source is None:
            return function(*inputs), self
        following = DroppedOutputs()
        with self.consumed():
            return following.run(function, *inputs), following

    def consumed(self) -> AbstractContextManager[None]:
        """Inside, what is saved of the outputs does not keep them in memory."""
        return nullcontext() if self._source is None else self._consumed(self._source)

    @contextmanager
    def _consumed(self, source: "_Recomputed") -> Iterator[None]:
        index_of = {storage.cdata: index for index, storage in enumerate(self._storages)}
        # Autograd applies the innermost hooks only; a profile or another function's notes may be outside.
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
            index = index_of.get(tensor.untyped_storage()._cdata)
            if index is not None and tensor._version == self._versions[index]:  # else it was written to since
                return partial(
                    source.view_of_output, index, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
                )
            if outer is None:
                return lambda: tensor
            outer_pack, outer_unpack = outer
            return partial(outer_unpack, outer_pack(tensor))

        with saved_tensors_hooks(pack, lambda saved: saved()):
            yield


class _Recomputed:
    """The outputs of a function and the tensors that it saves, made again when one of them is asked for."""

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[Any], precision: AbstractContextManager[None]
    ) -> None:
        """
        Args:
            precision: entered when the function runs again.
        """
        self._function, self._precision = function, precision
        self._num_saved = 0
        self._outputs: list[torch.Tensor] | None = None
        self._saved: list[torch.Tensor] = []
        self._inputs = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        self._tensors = {index: value.requires_grad for index, value in enumerate(inputs) if _is_tensor(value)}
        # Saved as a function's inputs are: another function may have dropped them.
        anchor = torch.empty((), requires_grad=True)
        # The output, not its grad_fn alone: in torch 2.11 that loses what it saved when the output is gone.
        self._saver = _SavedInputs.apply(anchor, *(inputs[index] for index in self._tensors))

    def drop(self, _: torch.Tensor) -> int:
        """Counts a tensor that the function saves; returns its index."""
        self._num_saved += 1
        return self._num_saved - 1

    def saved(self, index: int) -> torch.Tensor:
        """The tensor that the function saved."""
        self._run()
        return self._saved[index].detach()

    def view_of_output(
        self, index: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: Any
    ) -> torch.Tensor:
        """A tensor on the memory of an output, as it was when it was saved."""
        self._run()
        assert self._outputs is not None
        output = self._outputs[index]
        return torch.empty((), dtype=dtype, device=output.device).set_(output.untyped_storage(), offset, size, stride)

    def _run(self) -> None:
        if self._outputs is not None:
            return
        inputs = list(self._inputs)
        tensors = self._saver.grad_fn.saved_tensors
        for (index, requires_grad), tensor in zip(self._tensors.items(), tensors, strict=True):
            inputs[index] = tensor.detach().requires_grad_(requires_grad)

        def keep(tensor: torch.Tensor) -> None:
            self._saved.append(tensor.detach())

        with torch.enable_grad(), self._precision, saved_tensors_hooks(keep, _never_unpacked):
            outputs = self._function(*inputs)
        assert len(self._saved) == self._num_saved, "a function saved other tensors when it ran again"
        self._outputs = [output.detach() for output in _several(outputs)]
        self._saver = None


class _SavedInputs(torch.autograd.Function):
    """Saves tensors under the hooks that apply where it is called; it has no backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)


def _never_unpacked(_: None) -> torch.Tensor:
    raise AssertionError("the graph of a recomputation has no backward pass")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _several(outputs: Any) -> Sequence[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else cast(Sequence[torch.Tensor], outputs)


_SCOPES: ContextVar[list[ExitStack] | None] = ContextVar("scopes", default=None)
"""The objects between their two calls inside :func:`outputs_dropped_in_stock`; None outside of it."""


class _Checkpoint:
    """:class:`DroppedOutputs` with the interface of Megatron's ``CheckpointWithoutOutput``."""

    def __init__(self, scopes: list[ExitStack]) -> None:
        self._scopes = scopes

    def checkpoint[T](self, function: Callable[..., T], *inputs: Any) -> T:
        dropped = DroppedOutputs()
        outputs = dropped.run(function, *inputs)
        self._scopes.append(ExitStack())
        self._scopes[-1].enter_context(dropped.consumed())
        return outputs

    def discard_output_and_register_recompute(self, _: torch.Tensor) -> None:
        self._scopes.pop().close()


def outputs_dropped_in_stock(again: bool) -> AbstractContextManager[None]:
    """Inside, with ``again``, Megatron's modules drop outputs by :class:`DroppedOutputs`.

    Where they do so stays their own decision. They run what saves an output between two calls, one after the output
    was made and one after its last use. They get the object from :func:`make_checkpoint`, which a run puts in the place
    of Megatron's class.
    """
    return _outputs_dropped_in_stock() if again else nullcontext()


@contextmanager
def _outputs_dropped_in_stock() -> Iterator[None]:
    assert hasattr(tensor_parallel.CheckpointWithoutOutput, "__wrapped__"), "Megatron's own class is in place"
    scopes = list[ExitStack]()
    outer = _SCOPES.set(scopes)
    try:
        yield
    finally:
        _SCOPES.reset(outer)
        while scopes:  # a module raised between its two calls
            scopes.pop().close()


def make_checkpoint(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes Megatron's ``CheckpointWithoutOutput``; inside :func:`outputs_dropped_in_stock` what takes its place."""
    scopes = _SCOPES.get()
    return stock(*args, **kwargs) if scopes is None else _Checkpoint(scopes)
