"""Attention and routing of a layer for one chunk of a micro-batch in flight, captured in two CUDA graphs.

Between the combine of one layer and the token counts of the next, every shape is static: norm, attention, residual,
norm and router. The host launches one graph there in place of some fifty kernels, in the forward and in the backward.

A graph reads and writes its own memory, which its next replay overwrites. The next forward in the same memory starts
after the backward and its dWs, and the next backward after DDP's reads, so outputs and gradients of parameters are
handed out without a copy. Two tensors are copied because they are read later: the gradient of hidden states, which
deferred dWs of the previous layer keep, and the routing map, which a trace keeps until the step ends.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import random as tensor_parallel_random

from megatron_lancet.errors import UsageError
from megatron_lancet.model.adopt import is_of_ddp
from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.linear import trains_unwatched
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.patching import around
from megatron_lancet.runtime.weight_grad_store import DeferredWeight, WeightGradStore

_OF_CHUNK = ("hidden_sbH", "normed_sbH", "shared_input_sbH", "probs_tE", "routing_map_tE")
"""The outputs of attention and routing, as attributes of :class:`ChunkState`."""
_LOGITS = "logits_sbE"
"""Name of the router logits of a chunk. The balancing losses of the last chunk use the logits of all chunks."""


@dataclass(frozen=True)
class Pool:
    """Memory of graphs that are replayed in the order of their capture.

    Attributes:
        handle: torch's private memory pool.
        stream: the stream on which graphs are captured.
    """

    handle: Any
    stream: Any

    @contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Captures what is enqueued inside.

        An exception inside is raised again: torch's own error at the end of a failed capture would hide it.
        """
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # Transformer Engine's fused attention reads one also without dropout. Only states for graphs are generators.
        for state in tensor_parallel_random.get_cuda_rng_tracker().get_states().values():
            if isinstance(state, torch.Generator):
                graph.register_generator_state(state)
        failure: BaseException | None = None
        try:
            # Other threads, such as NCCL's watchdog, may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self.handle, stream=self.stream, capture_error_mode="thread_local"):
                try:
                    yield graph
                except BaseException as error:
                    failure = error
                    raise
        except BaseException:
            torch.cuda.set_stream(before)  # torch leaves the stream of a failed capture current
            if failure is None:
                raise
            raise failure from failure.__cause__


class SharedBuffers:
    """Buffers for gradients into and out of backward graphs. All blocks share them, because one runs at a time."""

    def __init__(self) -> None:
        self._tensors: dict[Any, torch.Tensor] = {}

    def like(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        """The buffer of a role, with the shape and dtype of a tensor."""
        key = role, tensor.shape, tensor.dtype
        if key not in self._tensors:
            self._tensors[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return self._tensors[key]


@dataclass(frozen=True)
class Inputs:
    """The inputs that a graph is captured for.

    Attributes:
        shape: shape of the hidden states, [s, b, H].
        dtype: dtype of the hidden states.
        chunk: a chunk with the rotary embedding that all replays use.
    """

    shape: torch.Size
    dtype: torch.dtype
    chunk: Chunk


@dataclass(frozen=True)
class Source:
    """Attention and routing of one layer.

    Attributes:
        run: runs both on a chunk with hidden states. Takes the router logits of the earlier chunks, [s, b, E] each, if
            the chunk is the last of several. Returns the chunk's logits, or None for the last chunk.
        warm_up: runs both eagerly; the router counts and logs nothing.
        modules: all modules of both, submodules included.
        store: store of deferred dWs.
    """

    run: Callable[[ChunkState, Sequence[torch.Tensor]], torch.Tensor | None]
    warm_up: Callable[[ChunkState], None]
    modules: Sequence[torch.nn.Module]
    store: WeightGradStore

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters that are trained."""
        return [p for module in self.modules for p in module.parameters(recurse=False) if p.requires_grad]

    @property
    def deferred(self) -> list[DeferredWeight]:
        """Weights whose gradients autograd does not return."""
        found = (getattr(module, "deferred", None) or () for module in self.modules)
        return [weight for one in found for weight in ((one,) if isinstance(one, DeferredWeight) else one)]

    def check_weights(self) -> None:
        """
        Raises:
            UsageError: a deferred weight is frozen or has a gradient hook; a replay would not see that.
        """
        if not all(trains_unwatched(weight.parameter) for weight in self.deferred):
            raise UsageError(
                "expected trained weights without gradient hooks in a CUDA graph, found a weight that was frozen or "
                "got a hook after the model was built. Drop --lancet-cuda-graphs, or do so before DDP wraps the model."
            )

    def warm_up_thread(self, like: Inputs) -> None:
        """Runs an eager forward on this thread.

        Libraries make handles and plans in a thread's first call, which CUDA forbids in a capture. With pairs the
        forwards of all earlier steps ran on another thread.
        """
        x = ChunkState(like.chunk)
        x.hidden_sbH = torch.zeros(like.shape, dtype=like.dtype, device=self.device, requires_grad=True)
        with _without_hooks(self.modules), _without_forks():
            self.warm_up(x)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(p.device for module in self.modules for p in module.parameters(recurse=False))


class CapturedBlock:
    """Attention and routing of one layer for one chunk of one micro-batch in flight.

    Capture all forwards of a pool in their order of execution, then all backwards in reverse.
    """

    def __init__(self, source: Source, pool: Pool, buffers: SharedBuffers) -> None:
        self._source, self._pool, self._buffers = source, pool, buffers
        self._parameters = source.parameters
        self._holders = [
            module for module in source.modules if next(module.parameters(recurse=False), None) is not None
        ]
        self._deferred: list[DeferredWeight] = []
        self._rotary: list[Any] = []  # graphs read it, and latent attention keeps it only in a bounded cache

    @property
    def logits(self) -> torch.Tensor:
        """Logits of a chunk that is not the last one, [s, b, E]."""
        return self._outputs[_LOGITS]

    def capture_forward(self, like: Inputs, earlier: Sequence[torch.Tensor] = ()) -> None:
        """Captures the forward.

        Args:
            like: the inputs to capture for.
            earlier: router logits of the earlier chunks, if this is the last of several.
        """
        source, x = self._source, ChunkState(like.chunk)
        # Not in the capture: torch's deterministic mode fills new memory, and each replay would fill it again.
        x.hidden_sbH = torch.empty(like.shape, dtype=like.dtype, device=source.device, requires_grad=True)
        self._inputs = [x.hidden_sbH, *(torch.empty_like(one, requires_grad=True) for one in earlier)]
        with (
            _without_hooks(source.modules),
            _rotary_of(source.modules) as self._rotary,
            _without_forks(),
            self._pool.capture() as self._forward,
        ):
            logits = source.run(x, self._inputs[1:])
        made = {**{name: getattr(x, name) for name in _OF_CHUNK}, _LOGITS: logits}
        self._outputs = {name: tensor for name, tensor in made.items() if tensor is not None}

    def capture_backward(self) -> None:
        """Captures the backward, including the dWs of linear layers."""
        ends = {name: tensor for name, tensor in self._outputs.items() if tensor.requires_grad}
        self._grads = {name: self._buffers.like(f"gradient of {name}", tensor) for name, tensor in ends.items()}
        self._results = [self._buffers.like(f"result {index}", one) for index, one in enumerate(self._inputs)]
        # Autograd would make the capture wait for the stream of a deferred weight, which is outside of it.
        late = {id(weight.parameter) for weight in self._source.deferred}
        self._direct = [place for place, parameter in enumerate(self._parameters) if id(parameter) not in late]
        sources = *self._inputs, *(self._parameters[place] for place in self._direct)
        with self._pool.capture() as self._backward, _at_once(self._source.store) as self._deferred:
            found = torch.autograd.grad(list(ends.values()), sources, list(self._grads.values()), allow_unused=True)
            for result, grad in zip(self._results, found, strict=False):
                if grad is not None:
                    result.copy_(grad)
            self._joined = _joined_by_type(found[len(self._inputs) :])
        self._has_grad = [grad is not None for grad in found[: len(self._inputs)]]
        # The autograd nodes are useless now: autograd has freed their saved tensors.
        self._outputs = {name: tensor.detach() for name, tensor in self._outputs.items()}

    def __call__(self, x: ChunkState, earlier: Sequence[torch.Tensor] = ()) -> torch.Tensor | None:
        """Runs the block on a chunk; returns the logits of a chunk that is not the last one.

        Args:
            earlier: router logits of the earlier chunks, if this is the last of several.
        """
        assert x.hidden_sbH.shape == self._inputs[0].shape, "chunks of a run have one size each"
        for module in self._holders:
            for hook in module._forward_pre_hooks.values():
                if is_of_ddp(hook):  # it waits for the module's gathered parameters
                    hook(module, ())
        outputs = _Replay.apply(self, x.hidden_sbH, *earlier, *self._parameters)
        made = dict(zip(self._outputs, outputs, strict=True))
        logits: torch.Tensor | None = made.pop(_LOGITS, None)
        for name, output in made.items():
            setattr(x, name, output)
        return logits

    def replay_forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs for hidden states and earlier logits."""
        for own, given in zip(self._inputs, inputs, strict=False):
            own.detach().copy_(given)
        self._forward.replay()
        outputs = self._outputs.values()
        return tuple(output.detach() if output.is_floating_point() else output.clone() for output in outputs)

    def replay_backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of inputs and parameters; None where a dW is in ``main_grad`` already.

        Args:
            grads: of the outputs, in order; None for zeros.
        """
        for name, grad in zip(self._outputs, grads, strict=True):
            if grad is not None:
                self._grads[name].copy_(grad)
            elif name in self._grads:
                self._grads[name].zero_()
        self._backward.replay()
        for weight in self._deferred:
            weight.put()
            weight.ran()
        found: list[torch.Tensor | None] = [None] * len(self._parameters)
        for joined, places in self._joined:
            parameters = [self._parameters[self._direct[place]] for place in places]
            parts = joined.split([parameter.numel() for parameter in parameters])
            for place, parameter, part in zip(places, parameters, parts, strict=True):
                found[self._direct[place]] = part.view_as(parameter)
        results = zip(self._results, self._has_grad, strict=True)
        return [*(result.clone() if has_grad else None for result, has_grad in results), *found]


class _Replay(torch.autograd.Function):
    """Runs a block; its parameters are inputs, so that autograd visits their accumulation nodes."""

    @staticmethod
    def forward(ctx: Any, block: CapturedBlock, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.block = block
        ctx.set_materialize_grads(False)
        outputs = block.replay_forward(inputs)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.block.replay_backward(grads)


def _joined_by_type(grads: Sequence[torch.Tensor | None]) -> list[tuple[torch.Tensor, list[int]]]:
    """Concatenates gradients by dtype, into one tensor each; also returns their indices."""
    places: dict[torch.dtype, list[int]] = {}
    for place, grad in enumerate(grads):
        if grad is not None:
            places.setdefault(grad.dtype, []).append(place)
    flat = [None if grad is None else grad.flatten() for grad in grads]
    return [(torch.cat([one for place in its if (one := flat[place]) is not None]), its) for its in places.values()]


@contextmanager
def _at_once(store: WeightGradStore) -> Iterator[list[DeferredWeight]]:
    """Inside, dWs run immediately, as part of the captured graph. Yields their weights.

    The time of a deferred dW depends on the clock, but graphs of a pool need a fixed order.
    """
    weights: list[DeferredWeight] = []

    def put(its: Sequence[DeferredWeight], compute: Callable[[], None]) -> None:
        weights.extend(its)
        with torch.no_grad():
            compute()

    store.put_captured = put
    try:
        yield weights
    finally:
        store.put_captured = None


def _without_forks() -> AbstractContextManager[None]:
    """Inside, Megatron's tracker does not change random states. CUDA forbids that in a capture; there is no dropout."""
    return around(tensor_parallel_random.CudaRNGStatesTracker, "fork", lambda *_, **__: nullcontext())


@contextmanager
def _rotary_of(modules: Sequence[torch.nn.Module]) -> Iterator[list[Any]]:
    """Yields the rotary embeddings that the modules return inside the context, and the buffers of these modules."""
    embeddings = [module for module in modules if isinstance(module, RotaryEmbedding)]
    found: list[Any] = [list(module.buffers()) for module in embeddings]
    with ExitStack() as stack:
        for module in embeddings:
            handle = module.register_forward_hook(lambda module, inputs, output: found.append(output))
            stack.callback(handle.remove)
        yield found
    found += [list(module.buffers()) for module in embeddings]


@contextmanager
def _without_hooks(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, DDP's hooks of modules do not run: a graph can't wait for a parameter.

    Raises:
        UsageError: a module has another hook, which a replay would skip.
    """
    for module in modules:
        kinds = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
        for hook in (hook for kind in kinds for hook in kind.values()):
            if not is_of_ddp(hook):
                name = getattr(hook, "__qualname__", type(hook).__name__)
                raise UsageError(
                    f"the hook {name} on {type(module).__name__} would not run in a CUDA graph. Drop the hook or "
                    "--lancet-cuda-graphs."
                )
    kept = [dict(module._forward_pre_hooks) for module in modules]
    try:
        for module in modules:
            module._forward_pre_hooks.clear()
        yield
    finally:
        for module, hooks in zip(modules, kept, strict=True):
            module._forward_pre_hooks.update(hooks)
