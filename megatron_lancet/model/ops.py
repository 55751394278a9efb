"""State that passes between the ops of a chunk, and their trace."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.dispatcher.routes import PendingRoutes, Routes
from megatron_lancet.model.recompute import DroppedOutputs
from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.recorder import Recorder
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.turns import ROWS_MADE_BY, AddResidual, Compute, Instruction, Launch, Verb, Wait


class ChunkState:
    """A chunk and its tensors. A tensor is held from the op that makes it to the last op that needs it.

    Attributes:
        chunk: which part of the micro-batch it is.
        hidden_sbH: the residual stream, [s, b, H].
        embedded_sbH: embeddings of the next tokens, for a multi-token prediction; [S, B, H].
        normed_sbH: input of the router and of the experts, [s, b, H].
        norm: drops ``normed_sbH``, where that is recomputed.
        shared_input_sbH: the same for the experts that see all tokens; None before the router and behind them.
        probs_tE: weights of each token's experts, [t, E].
        routing_map_tE: the experts of each token, [t, E] bool.
        routed: the point in time at which ``routing_map_tE`` was complete.
        routes: how many rows go where, known when the counts have arrived, or at once where none are sent.
        permutation: maps rows to tokens.
        rows: rows to be sent, or received; [n, ...] each.
        kept: what the ops of an optional part keep for each other.
        has_output: whether ``rows`` are the outputs of the chunk's local tokens already, before the experts' turn.
        message: the all-to-all in flight.
        ticket: edge of the graph from the launch of the message to its wait.
        shared_sbH: output of the experts that see all tokens until it is added, [s, b, H].
        unsent_sbH: part of the output that is made of no rows, [s, b, H].
        output_sbH: output of all experts, [s, b, H].
    """

    hidden_sbH: torch.Tensor
    embedded_sbH: torch.Tensor
    normed_sbH: torch.Tensor
    norm: DroppedOutputs
    shared_input_sbH: torch.Tensor | None = None
    probs_tE: torch.Tensor
    routing_map_tE: torch.Tensor
    routed: ReadyEvent
    routes: PendingRoutes[Any] | Routes | None = None
    permutation: Any
    rows: tuple[torch.Tensor, ...]
    kept: Any
    has_output: bool = False
    message: AllToAll
    ticket: torch.Tensor
    shared_sbH: torch.Tensor | None = None
    unsent_sbH: torch.Tensor
    output_sbH: torch.Tensor

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.norm = DroppedOutputs()

    @property
    def present_routes(self) -> PendingRoutes[Any] | Routes:
        """The routes, between the launch of the counts and the launch of the last combine."""
        assert self.routes is not None
        return self.routes

    def launch(self, message: AllToAll) -> None:
        """Launches ``message`` with the rows."""
        self.message, self.ticket = message, message.launch(*self.rows)
        del self.rows

    def wait(self) -> None:
        """Waits for the message in flight; its rows replace those that were sent."""
        self.rows = self.message.wait(self.ticket)
        del self.message, self.ticket

    def passes_through(self, verb: Verb) -> bool:
        """Whether the chunk passes through an op without work, since it has its output already."""
        return self.has_output and (isinstance(verb, Launch | Wait) or verb.kind in ROWS_MADE_BY.values())

    def pass_through(self, comm: Comm, instruction: Instruction) -> None:
        """Runs an instruction for which :meth:`passes_through` holds: messages keep their places, and are empty."""
        if isinstance(instruction.verb, Launch):
            self.launch(AllToAll(comm, instruction.op, None))
        elif isinstance(instruction.verb, Wait):
            self.wait()


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


def traced(trace: Recorder | None, instruction: Instruction, x: ChunkState) -> AbstractContextManager[None]:
    """Traces the instruction that runs inside: the end of its op, and in the graph the end of the op's backward.

    Args:
        trace: None where nothing is recorded.
    """
    return nullcontext() if trace is None else _traced(trace, instruction, x)


@contextmanager
def _traced(trace: Recorder, instruction: Instruction, x: ChunkState) -> Iterator[None]:
    verb, op = instruction.verb, instruction.op
    if verb in _FORKS:
        setattr(x, _FORKS[verb], trace.boundary(getattr(x, _FORKS[verb]), str(op.mirrored())))
    elif verb == AddResidual(OpKind.POSTPROCESS) and x.chunk.num_chunks == 1:
        # After a concatenation, which is another op.
        x.output_sbH = trace.boundary(x.output_sbH, str(op.mirrored()))
    elif verb == Compute(OpKind.EXPERTS):
        trace.received(str(op), x.present_routes.wait().num_rows)
    yield
    if isinstance(verb, Launch):
        made_by = op.with_kind(ROWS_MADE_BY[verb.kind])
        # All tiles are made before the first of them leaves.
        if made_by.tile == op.tile or op.tile == 0:
            trace.end(str(made_by))
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


def begin_layers(trace: Recorder, hidden: torch.Tensor, has_embedding: bool) -> torch.Tensor:
    """Traces the end of the embedding, before a stage's first layer.

    Args:
        hidden: [S, B, H].
    """
    if not has_embedding:
        trace.skip()
        return hidden
    trace.end(_name(Phase.FORWARD, OpKind.EMBEDDING))
    return trace.last_boundary(hidden, _name(Phase.INPUT_GRAD, OpKind.EMBEDDING))


def end_layers(trace: Recorder | None, hidden: torch.Tensor, following: Op | None) -> torch.Tensor:
    """Traces the start of the op that follows a stage's last layer, or a multi-token prediction's layer.

    Args:
        trace: None where nothing is recorded.
        hidden: [S, B, H].
        following: the op in the forward pass; None where it is on the next stage.
    """
    return hidden if trace is None or following is None else trace.boundary(hidden, str(following.mirrored()))


def begin_cut(trace: Recorder | None, hidden: torch.Tensor) -> torch.Tensor:
    """Traces the start of a split or a concatenation; returns ``hidden``.

    Args:
        trace: None where nothing is recorded.
        hidden: [S, B, H], or the hidden states of the last chunk.
    """
    return hidden if trace is None else trace.boundary(hidden, _name(Phase.INPUT_GRAD, OpKind.CUT))


def end_cut(trace: Recorder | None) -> None:
    """Traces the end of a split or a concatenation.

    Args:
        trace: None where nothing is recorded.
    """
    if trace is not None:
        trace.end(_name(Phase.FORWARD, OpKind.CUT))


def _name(phase: Phase, kind: OpKind) -> str:
    return str(Op.beside_layers(phase, kind))
