"""The contract of every transport: it moves rows, and token counts, from rank to rank.

Legend: P = number of ranks in the expert-parallel group, Q = in the group that exchanges counts, N / M = rows sent /
received, e = number of experts per rank.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron_lancet.runtime.trace import Point


class Transfer(Protocol):
    """One all-to-all that has been launched."""

    def done(self) -> bool:
        """Whether it has certainly completed; never blocks."""

    def wait(self) -> None:
        """Makes what compute does next see the received rows. Raises RuntimeError when a peer is gone."""

    def interval(self) -> tuple[Point, Point]:
        """When it was launched and when it was complete; call it after the wait."""


class ReadyEvent:
    """The moment at which the rows of a message were complete. What is computed after it does not delay the message."""

    def __init__(self, sent: torch.Tensor) -> None:
        """Called when ``sent`` has just been written, or its writing has been enqueued."""
        self._event = torch.cuda.current_stream().record_event() if sent.is_cuda else None

    def block(self, stream: torch.cuda.Stream) -> None:
        """Makes ``stream`` wait for that moment."""
        assert self._event is not None
        stream.wait_event(self._event)


class Transport(Protocol):
    """Moves rows between the ranks of one expert-parallel group.

    Attributes:
        launches_in_callback: messages that waited for token counts may be launched on any thread, and at any place
            among the others.
        is_local: the group has one rank, whose rows stay where they are: nothing is to be launched.
    """

    launches_in_callback: bool
    is_local: bool

    def launch(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        ready: ReadyEvent | None = None,
    ) -> Transfer:
        """Launches an all-to-all.

        Args:
            received: [M, ...] contiguous; filled when the transfer has been waited for.
            sent: [N, ...] contiguous, rows ordered by destination rank; not to be changed afterwards: other ranks may
                read them after this rank has received all of its own. The transport keeps them alive.
            receive_rows: rows from each of the P ranks, sums to M.
            send_rows: rows to each of the P ranks, sums to N.
            ready: when ``sent`` was complete, of a message that had to wait for its token counts. All ranks launch
                these messages in the same order, and the others in the same order.
        """

    def empty_receive(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """An empty tensor to receive a message that is launched later, of the type and device of ``like``."""

    def exchange_counts(self, counts: torch.Tensor) -> "CountsTransfer":
        """Launches the exchange of token counts: [Q * e], for each rank its experts', in rank order."""


class CountsTransfer(Protocol):
    """One exchange of token counts.

    Attributes:
        own_bytes: part of what is sent that stays on this rank.
    """

    own_bytes: int

    def watch(self) -> None:
        """Records when it completes, for :meth:`interval`."""

    def interval(self) -> tuple[Point, Point]:
        """When it was launched and when it was complete; call it after the wait, and after :meth:`watch`."""

    def done(self) -> bool:
        """Whether it has completed or failed; never blocks."""

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` then: at once, or on another thread. Only where ``launches_in_callback``."""

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sent and received counts on the host: both [Q, e], by peer and by that peer's (own) expert."""
