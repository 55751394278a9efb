"""What every transport does: rows, and token counts, from rank to rank.

Legend: P = number of ranks in the expert-parallel group, Q = in the group that exchanges counts, N / M = rows sent /
received, e = number of experts per rank.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron_lancet.runtime.trace import Point


class Transfer(Protocol):
    """One all-to-all that is on its way."""

    def done(self) -> bool:
        """Whether it has certainly completed; never blocks."""

    def wait(self) -> None:
        """Makes what compute does next see the received rows. Raises RuntimeError when a peer is gone."""

    def interval(self) -> tuple[Point, Point]:
        """When it left and when it was complete; after the wait."""


class Armed:
    """The moment at which a message was complete that leaves later. What is computed meanwhile does not delay it."""

    def __init__(self, sent: torch.Tensor) -> None:
        """Called when ``sent`` has just been written, or its writing been enqueued."""
        self._event = torch.cuda.current_stream().record_event() if sent.is_cuda else None

    def precedes(self, stream: torch.cuda.Stream) -> None:
        """Makes ``stream`` wait for that moment."""
        assert self._event is not None
        stream.wait_event(self._event)


class Transport(Protocol):
    """Moves rows between the ranks of one expert-parallel group.

    Attributes:
        leaves_by_itself: armed messages may start on any thread, and at any place among the others.
        is_alone: the group has one rank, whose rows stay where they are: nothing is to be started.
    """

    leaves_by_itself: bool
    is_alone: bool

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        armed: Armed | None = None,
    ) -> Transfer:
        """Starts an all-to-all.

        Args:
            received: [M, ...] contiguous, filled by the time that the transfer was waited for.
            sent: [N, ...] contiguous, rows ordered by destination rank; not to be changed afterwards: others may take
                them after this rank has all of its own. The transport keeps them alive.
            receive_rows: rows from each of the P ranks, sums to M.
            send_rows: rows to each of the P ranks, sums to N.
            armed: given where ``sent`` was complete some time ago. All ranks start the armed messages in the same
                order, and the others in the same order.
        """

    def make_room(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """A tensor that an armed message can be received into, of the type and device of ``like``."""

    def exchange_counts(self, counts: torch.Tensor) -> "CountsTransfer":
        """Starts the exchange of token counts: [Q * e], for each rank its experts', in rank order."""


class CountsTransfer(Protocol):
    """Token counts that are on their way.

    Attributes:
        own_bytes: part of what is sent that stays on this rank.
    """

    own_bytes: int

    def watch(self) -> None:
        """Note when they come, for :meth:`interval`."""

    def interval(self) -> tuple[Point, Point]:
        """When they left and when they had come; after the wait, and only where they were watched."""

    def done(self) -> bool:
        """Whether they have come, or have failed to; never blocks."""

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` then: at once, or on another thread. Only where the transport leaves by itself."""

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sent and received counts on the host: both [Q, e], by peer and by that peer's (own) expert."""
