"""Where ops beside the layers begin and end, for the trace: embedding, head, and cuts into chunks."""

from typing import Any

import torch

from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.trace import Trace
from megatron_lancet.schedule.ops import Op, OpKind, Phase


def trace_ends(model: torch.nn.Module, comm: Comm) -> None:
    """Makes ``model`` report to the trace of ``comm`` where its forward and its backward begin, and its head ends."""

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
    """Before a stage's first layer.

    Args:
        hidden: [S, B, H].
    """
    if not has_embedding:
        trace.skip()
        return hidden
    trace.end(_name(Phase.FORWARD, OpKind.EMBEDDING))
    return trace.last_boundary(hidden, _name(Phase.INPUT_GRAD, OpKind.EMBEDDING))


def end_layers(trace: Trace, hidden: torch.Tensor, has_head: bool) -> torch.Tensor:
    """After a stage's last layer.

    Args:
        hidden: [S, B, H].
    """
    return trace.boundary(hidden, _name(Phase.INPUT_GRAD, OpKind.HEAD)) if has_head else hidden


def begin_cut(trace: Trace | None, hidden: torch.Tensor) -> torch.Tensor:
    """Before a micro-batch is cut, or chunks are put together.

    Args:
        trace: None where nothing is recorded.
        hidden: [S, B, H], or that of the last chunk.
    """
    return hidden if trace is None else trace.boundary(hidden, _name(Phase.INPUT_GRAD, OpKind.CUT))


def end_cut(trace: Trace | None) -> None:
    """After it.

    Args:
        trace: None where nothing is recorded.
    """
    if trace is not None:
        trace.end(_name(Phase.FORWARD, OpKind.CUT))


def _name(phase: Phase, kind: OpKind) -> str:
    return str(Op.beside_layers(phase, kind))
