"""Ops among what is enqueued: a trace that writes marks into the log of a virtual GPU instead of taking times."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lancet.runtime.recorder import Message
from megatron_lancet.runtime.trace import Trace
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu
from megatron_lancet.testkit.virtual_gpu.log import Mark

END, SKIP, BEGIN, RESUME = "end", "skip", "begin", "resume"
"""Kinds of a mark: an op ends; the time before belongs to no op; a wait or a weight gradient begins, and ends."""
TURN_BEGINS, TURN_ENDS = "turn begins", "turn ends"
"""Kinds of a mark: a forward takes a turn during a backward. All between the two is the forward's."""


@dataclass(frozen=True)
class MarkedMessage:
    """A message between two events, its launch and its arrival.

    Attributes:
        name: op as text.
        num_bytes: bytes sent to other ranks.
    """

    name: str
    num_bytes: int
    start_event: int
    end_event: int


class MarkedTrace(Trace):
    """A trace whose points are places in the log of ``gpu``.

    Attributes:
        messages: messages that have been waited for.
    """

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        super().__init__(torch.device("cpu"), 0)

    def begin_step(self) -> None:
        self.messages: list[MarkedMessage] = []

    def skip(self) -> None:
        self._gpu.note(Mark(SKIP, ""))

    def end(self, name: str) -> None:
        self._gpu.note(Mark(END, name))

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        self._gpu.note(Mark(BEGIN, name))
        yield
        self._gpu.note(Mark(RESUME, name))

    @contextmanager
    def forward_turn(self) -> Iterator[None]:
        self._gpu.note(Mark(TURN_BEGINS, ""))
        yield
        self._gpu.note(Mark(TURN_ENDS, ""))

    @contextmanager
    def weight_grad(self, name: str, pinned_bytes: int, weight_bytes: int) -> Iterator[None]:
        with self.waiting(name):
            yield

    def sent(self, name: str, num_bytes: int, message: Message, bytes_to: Sequence[int] = ()) -> None:
        points: tuple[Any, Any] = message.interval()
        start, end = points
        self.messages.append(MarkedMessage(name, num_bytes, start.number, end.number))

    def received(self, name: str, num_rows: int) -> None:
        """Does nothing: the log has the sizes of all kernels."""

    def routed(
        self, name: str, routing_map_tE: torch.Tensor, num_local_experts: int, nodes: Nodes | None = None
    ) -> None:
        """Does nothing, like :meth:`received`."""
