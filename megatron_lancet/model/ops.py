"""State that passes between the ops of a chunk, their trace and their recomputation."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from torch.utils.checkpoint import checkpoint

from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.dispatcher.all_to_all import PendingRoutes, Permutation
from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.trace import Trace
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.turns import ROWS_MADE_BY, AddResidual, Compute, Instruction, Launch, Verb


class ChunkState:
    """A chunk and its tensors. An attribute exists from the op that makes it to the last op that needs it.

    Attributes:
        chunk: which part of the micro-batch it is.
        hidden_sbH: the residual stream, [s, b, H].
        normed_sbH: input of the router and of the experts, [s, b, H].
        shared_input_sbH: the same for the experts that see all tokens.
        probs_tE: weights of each token's experts, [t, E].
        routing_map_tE: the experts of each token, [t, E] bool.
        routes: how many rows go where, known when the counts have arrived.
        permutation: maps rows to tokens.
        rows: rows to be sent, or received; [n, ...] each.
        message: the all-to-all in flight.
        ticket: edge of the graph from the launch of the message to its wait.
        shared_sbH: output of the experts that see all tokens, [s, b, H].
        output_sbH: output of all experts, [s, b, H].
    """

    hidden_sbH: torch.Tensor
    normed_sbH: torch.Tensor
    shared_input_sbH: torch.Tensor
    probs_tE: torch.Tensor
    routing_map_tE: torch.Tensor
    routes: PendingRoutes
    permutation: Permutation
    rows: tuple[torch.Tensor, ...]
    message: AllToAll
    ticket: torch.Tensor
    shared_sbH: torch.Tensor
    output_sbH: torch.Tensor

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk

    def launch(self, message: AllToAll) -> None:
        """Launches ``message`` with the rows."""
        self.message, self.ticket = message, message.launch(*self.rows)
        del self.rows

    def wait(self) -> None:
        """Waits for the message in flight; its rows replace those that were sent."""
        self.rows = self.message.wait(self.ticket)
        del self.message, self.ticket


_FORKS: dict[Verb, str] = {
    Compute(OpKind.ATTENTION): "hidden_sbH",
    Compute(OpKind.NORM): "hidden_sbH",
    Compute(OpKind.MLP): "hidden_sbH",
    Compute(OpKind.ROUTE): "normed_sbH",
    Compute(OpKind.PREPROCESS): "probs_tE",
    Compute(OpKind.SHARED_EXPERTS): "shared_input_sbH",
}
"""The tensor whose complete gradient ends an op's backward: the one in front of the fork where a residual bypasses the
op, or the experts' input bypasses the router. An op that receives its rows by a message has none: its backward ends
where the message with their gradients is launched."""


@contextmanager
def traced(trace: Trace | None, instruction: Instruction, x: ChunkState) -> Iterator[None]:
    """Traces the instruction that runs inside: the end of its op, and in the graph the end of the op's backward.

    Args:
        trace: None where nothing is recorded.
    """
    if trace is None:
        yield
        return
    verb, op = instruction.verb, instruction.op
    if verb in _FORKS:
        setattr(x, _FORKS[verb], trace.boundary(getattr(x, _FORKS[verb]), str(op.mirrored())))
    elif isinstance(verb, AddResidual) and x.chunk.num_chunks == 1:
        # After a concatenation, which is another op.
        x.output_sbH = trace.boundary(x.output_sbH, str(op.mirrored()))
    elif verb == Compute(OpKind.EXPERTS):
        trace.received(str(op), len(x.rows[0]))
    yield
    if isinstance(verb, Launch):
        trace.end(str(op.with_kind(ROWS_MADE_BY[verb.kind])))
    elif isinstance(verb, Compute | AddResidual) and verb.kind not in ROWS_MADE_BY.values():
        trace.end(str(op))


def trace_ends(model: torch.nn.Module, comm: Comm) -> None:
    """Makes ``model`` trace where its forward and its backward begin and where its head ends, to ``comm.trace``."""

    def before(*_: Any) -> None:
        if comm.trace is not None and torch.is_grad_enabled():
            comm.trace.skip()

    def after(model: Any, _: Any, output: torch.Tensor) -> torch.Tensor | None:
        if comm.trace is None or not torch.is_grad_enabled():
            return None
        if model.post_process:
            comm.trace.end(_name(Phase.FORWARD, OpKind.HEAD))
        return comm.trace.begin_backward(output)

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)


def begin_layers(trace: Trace, hidden: torch.Tensor, has_embedding: bool) -> torch.Tensor:
    """Traces the end of the embedding, before a stage's first layer.

    Args:
        hidden: [S, B, H].
    """
    if not has_embedding:
        trace.skip()
        return hidden
    trace.end(_name(Phase.FORWARD, OpKind.EMBEDDING))
    return trace.last_boundary(hidden, _name(Phase.INPUT_GRAD, OpKind.EMBEDDING))


def end_layers(trace: Trace, hidden: torch.Tensor, has_head: bool) -> torch.Tensor:
    """Traces the begin of the head, after a stage's last layer.

    Args:
        hidden: [S, B, H].
    """
    return trace.boundary(hidden, _name(Phase.INPUT_GRAD, OpKind.HEAD)) if has_head else hidden


def begin_cut(trace: Trace | None, hidden: torch.Tensor) -> torch.Tensor:
    """Traces the begin of a split or a concatenation; returns ``hidden``.

    Args:
        trace: None where nothing is recorded.
        hidden: [S, B, H], or the hidden states of the last chunk.
    """
    return hidden if trace is None else trace.boundary(hidden, _name(Phase.INPUT_GRAD, OpKind.CUT))


def end_cut(trace: Trace | None) -> None:
    """Traces the end of a split or a concatenation.

    Args:
        trace: None where nothing is recorded.
    """
    if trace is not None:
        trace.end(_name(Phase.FORWARD, OpKind.CUT))


def _name(phase: Phase, kind: OpKind) -> str:
    return str(Op.beside_layers(phase, kind))


@dataclass(frozen=True)
class Recompute:
    """Which ops of a layer are recomputed in the backward pass: all that lies between its collectives, or a part.

    Megatron's own checkpoints run a backward pass inside the backward pass: there a weight's gradient would seem
    complete after each chunk, and a layer's all-to-alls would run a second time. torch's non-reentrant checkpoint
    leaves the graph as it is and only makes saved tensors again, so the mirrored pipeline and the deferred dWs stay
    what they are, and no all-to-all is repeated. What an op receives stays in memory: a layer's input, and the rows
    that the experts got.

    Attributes:
        attention: norms and attention, up to the router's input; the norm alone in a layer without attention.
        mlp: the MLP of a layer without experts.
        experts: the experts, from the rows that arrived to the rows that leave.
        shared_experts: the experts that see all tokens.
    """

    attention: bool = False
    mlp: bool = False
    experts: bool = False
    shared_experts: bool = False


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
    return Recompute(mlp="mlp" in modules, experts=moe, shared_experts=moe or "shared_experts" in modules)


def maybe_recomputed[T](again: bool, segment: Callable[..., T], *args: Any) -> T:
    """Returns ``segment(*args)``; with ``again``, saved tensors are dropped and recomputed in the backward pass.

    Args:
        segment: function without lasting effects; it draws the same random numbers when it runs again.
    """
    if not again:
        return segment(*args)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = tracker.get_states()

    @contextmanager
    def with_first_states() -> Iterator[None]:
        now = tracker.get_states()
        tracker.set_states(states)
        try:
            yield
        finally:
            tracker.set_states(now)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), with_first_states()

    return checkpoint(segment, *args, use_reentrant=False, context_fn=contexts)
