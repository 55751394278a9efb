"""The calls by which the runtime and the model record a step; see ``trace.py``."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import Op

Point = float | torch.cuda.Event
"""Seconds of ``time.perf_counter``, or an event on a stream."""


class Message(Protocol):
    """A message that was launched."""

    def interval(self) -> tuple[Point, Point]:
        """Returns the times of launch and completion; call after the wait."""


class Recorder(Protocol):
    """Records what a rank does in a step. :class:`~megatron_lancet.runtime.trace.Trace` says what each call means."""

    def skip(self) -> None: ...
    def end(self, name: str) -> None: ...
    def waiting(self, name: str) -> AbstractContextManager[None]: ...
    def forward_turn(self) -> AbstractContextManager[None]: ...
    def weight_grad(self, name: str, pinned_bytes: int, weight_bytes: int) -> AbstractContextManager[None]: ...
    def sent(self, name: str, num_bytes: int, message: Message, bytes_to: Sequence[int] = ()) -> None: ...
    def received(self, name: str, num_rows: int) -> None: ...
    def routed(
        self, name: str, routing_map_tE: torch.Tensor, num_local_experts: int, nodes: Nodes | None = None
    ) -> None: ...
    def boundary(self, tensor: torch.Tensor, name: str) -> torch.Tensor: ...
    def begin_backward(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def last_boundary(self, tensor: torch.Tensor, name: str) -> torch.Tensor: ...


def waiting(trace: Recorder | None, op: Op) -> AbstractContextManager[None]:
    """The computing thread waits for ``op`` inside.

    Args:
        trace: None where nothing is recorded.
    """
    return nullcontext() if trace is None else trace.waiting(str(op))
