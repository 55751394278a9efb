"""Stand-ins of the runtime's parts for tests of the parts next to them."""

import threading
from collections.abc import Callable, Sequence

import torch

from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.base import ReadyEvent, TokenCounts
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.dw_queue import DwRules


def cpu_stats() -> CommStats:
    return CommStats(torch.device("cpu"))


def store_without_autograd(rules: DwRules, stats: CommStats) -> WeightGradStore:
    """A store outside of a backward pass: the test calls its ``flush()``."""
    return _StoreWithoutAutograd(rules, stats)


class _StoreWithoutAutograd(WeightGradStore):
    def _flush_at_end_of_backward(self) -> None:
        """Autograd calls nothing back outside of a backward pass."""


class MicroOp:
    """A part of a gradient reduction, whose launch, wait and release call the test's functions with its name."""

    def __init__(
        self,
        name: str,
        num_bytes: int,
        launched: Callable[[str], None],
        waited: Callable[[str], None] = lambda name: None,
        released: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.name, self.num_bytes = name, num_bytes
        self._launched, self._waited, self._released = launched, waited, released
        self.done = False

    def launch(self) -> None:
        self._launched(self.name)

    def wait(self) -> None:
        self._waited(self.name)

    def release_if_done(self) -> bool:
        if self.done:
            self._released(self.name)
        return self.done


class Loopback:
    """A transport between this rank and a mirror of it: what is sent comes back, multiplied, with the wait.

    Attributes:
        log: what was called, in order.
        error: what each wait raises from now on.
    """

    is_local = False

    def __init__(self, factor: float = 1.0, launches_in_callback: bool = False) -> None:
        self.factor = factor
        self.launches_in_callback = launches_in_callback
        self.log: list[str] = []
        self.error: RuntimeError | None = None

    def launch(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        ready: ReadyEvent | None = None,
    ) -> "LoopbackTransfer":
        assert sum(receive_rows) == len(received)
        assert sum(send_rows) == len(sent)
        self.log.append(self.launch_entry(sent, ready))
        return LoopbackTransfer(self, received, sent)

    def launch_entry(self, sent: torch.Tensor, ready: ReadyEvent | None) -> str:
        """The entry of a launch in the log."""
        return "launch"

    def empty_receive(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(shape)

    def exchange_counts(self, count: Callable[[], torch.Tensor], ready: ReadyEvent) -> "LoopbackCounts":
        self.log.append(f"counts {int(count()[0])}")
        return LoopbackCounts(self)


class LoopbackTransfer:
    """The handle of a launch: never done before it is waited for."""

    def __init__(self, transport: Loopback, received: torch.Tensor, sent: torch.Tensor) -> None:
        self.transport, self.received, self.sent = transport, received, sent

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        if self.transport.error is not None:
            raise self.transport.error
        self.transport.log.append("wait")
        self.received.view(torch.float32).copy_(self.transport.factor * self.sent.view(torch.float32))


class LoopbackCounts:
    """An exchange of counts that arrive when the test calls :meth:`arrive`: two rows, from and to the only rank."""

    def __init__(self, transport: Loopback) -> None:
        self.transport = transport
        self.arrived = threading.Event()
        self.callbacks: list[Callable[[], None]] = []
        self.error: BaseException | None = None

    def arrive(self) -> None:
        self.arrived.set()
        for callback in self.callbacks:
            callback()

    def done(self) -> bool:
        return self.arrived.is_set()

    def when_done(self, callback: Callable[[], None]) -> None:
        assert self.transport.launches_in_callback
        if self.done():
            callback()
        else:
            self.callbacks.append(callback)

    def wait(self) -> TokenCounts:
        if not self.transport.launches_in_callback:
            self.transport.log.append("host waits")
        self.arrived.wait()
        if self.error is not None:
            raise self.error
        return TokenCounts([[2]], [[2]], torch.tensor([[2]]))
