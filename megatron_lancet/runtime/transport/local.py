"""Transport of a group of one rank on a CPU, whose rows stay in place."""

from collections.abc import Callable, Sequence

import torch

from megatron_lancet.runtime.recorder import Point
from megatron_lancet.runtime.transport.base import CountsTransfer, ReadyEvent, TokenCounts, Transfer, Transport


class OwnCounts:
    """Token counts of a single rank, known at once."""

    def __init__(self, counts: torch.Tensor) -> None:
        self._counts = counts.view(1, -1)
        self.num_bytes = 0

    def done(self) -> bool:
        return True

    def when_done(self, callback: Callable[[], None]) -> None:
        callback()

    def watch(self) -> None:
        raise AssertionError("token counts of a single rank are not sent")

    def interval(self) -> tuple[Point, Point]:
        raise AssertionError("token counts of a single rank are not sent")

    def wait_for_own(self) -> list[list[int]]:
        own: list[list[int]] = self._counts.tolist()
        return own

    def wait(self) -> TokenCounts:
        own = self.wait_for_own()
        return TokenCounts(own, own, self._counts)


class LocalTransport(Transport):
    """Transport of a group of one rank; :class:`~megatron_lancet.runtime.comm.Comm` launches nothing on it."""

    launches_in_callback = True
    is_local = True

    def launch(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        ready: ReadyEvent | None = None,
    ) -> Transfer:
        raise AssertionError("rows of a single rank are not sent")

    def exchange_counts(self, count: Callable[[], torch.Tensor], ready: ReadyEvent) -> CountsTransfer:
        return OwnCounts(count())
