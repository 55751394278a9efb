"""Defines the contract of every transport, which moves rows and token counts from rank to rank.

Legend: P = ranks of the expert-parallel group, Q = ranks of the group that exchanges counts, N / M = rows sent /
received, e = experts per rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_lancet.runtime.device import on_cuda
from megatron_lancet.runtime.recorder import Point


class Transfer(Protocol):
    """One all-to-all that has been launched."""

    def done(self) -> bool:
        """Whether the transfer has certainly completed; never blocks."""

    def wait(self) -> None:
        """Makes the received rows visible to the compute that follows. Raises RuntimeError when a peer is gone."""

    def interval(self) -> tuple[Point, Point]:
        """Returns the times of launch and completion; call after the wait."""


class ReadyEvent:
    """The point in time at which what a message sends was complete; later compute does not delay the message."""

    def __init__(self, sent: torch.Tensor) -> None:
        """Records the point after ``sent`` was written, or its kernels were enqueued on the current stream."""
        self._event = torch.cuda.current_stream().record_event() if on_cuda(sent) else None

    def block(self, stream: torch.cuda.Stream) -> None:
        """Makes ``stream`` wait for that point."""
        assert self._event is not None
        stream.wait_event(self._event)

    def block_current(self) -> None:
        """Makes the current stream wait for that point; on a CPU it has passed."""
        if self._event is not None:
            self.block(torch.cuda.current_stream())


class Transport(Protocol):
    """Moves rows between the ranks of one expert-parallel group.

    Attributes:
        launches_in_callback: messages that waited for token counts may be launched on any thread, and at any place
            among the others.
        is_local: the group has one rank, whose rows stay in place, so nothing is launched.
    """

    launches_in_callback: bool = False
    is_local: bool = False

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
            sent: [N, ...] contiguous, rows ordered by destination rank. They must not be changed afterwards: other
                ranks may read them after this rank has received all of its own. The transport keeps them alive.
            receive_rows: rows from each of the P ranks, sums to M.
            send_rows: rows to each of the P ranks, sums to N.
            ready: point at which ``sent`` was complete, for a message that waited for its token counts. All ranks
                launch these messages in the same order, and the others in the same order.
        """

    def empty_receive(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Returns an empty tensor for a message that is launched later, of the type and device of ``like``."""
        return like.new_empty(shape)

    def exchange_counts(self, count: Callable[[], torch.Tensor], ready: ReadyEvent) -> "CountsTransfer":
        """Launches the exchange of token counts.

        Args:
            count: returns the counts [Q * e] for each rank's experts, in rank order. It is called before this returns;
                on CUDA its kernels run behind ``ready`` on the stream of the counts, so what it reads must be complete
                there, and must be kept until the wait.
            ready: the point in time behind which ``count`` may read.
        """


@dataclass(frozen=True)
class TokenCounts:
    """Token counts that have been exchanged, by peer and by that peer's (own) expert.

    Attributes:
        sent: [Q][e].
        received: [Q][e].
        received_on_device: [Q, e], the received counts on the device of the rows.
    """

    sent: list[list[int]]
    received: list[list[int]]
    received_on_device: torch.Tensor


class CountsTransfer(Protocol):
    """One exchange of token counts.

    Attributes:
        num_bytes: bytes that are sent to other ranks.
    """

    num_bytes: int

    def watch(self) -> None:
        """Records the time of completion for :meth:`interval`."""

    def interval(self) -> tuple[Point, Point]:
        """Returns the times of launch and completion; call after :meth:`watch` and the wait."""

    def done(self) -> bool:
        """Whether the exchange has completed or failed; never blocks."""

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` on completion or failure: now, or on another thread. Needs ``launches_in_callback``."""

    def wait_for_own(self) -> list[list[int]]:
        """Blocks the host until the sent counts [Q][e] are known there.

        Other ranks are not waited for, except on CUDA by an earlier exchange that is still in flight.
        """

    def wait(self) -> TokenCounts:
        """Blocks the host until the counts are known there."""
