"""Pending messages of a mocked group: each completes at the time that the link model gives.

The data moves when a message completes, not when it is issued. So code that reads too early, or changes a tensor that
is being sent, computes wrong values, as on a real link.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lancet.errors import UsageError
from megatron_lancet.training.platform.cuda_connections import CONNECTIONS, RECOMMENDED, has_one_connection

_NO_TIMEOUT = timedelta(0)
"""The value that c10d passes if the caller gave no timeout: the group's own timeout applies."""


class Clock:
    """Calls functions at their times, on one thread that starts with the first call."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def call_at(self, due_s: float, function: Callable[[], None]) -> None:
        """Calls ``function`` when ``time.perf_counter`` has reached ``due_s``."""
        with self._changed:
            assert not self._closed
            heapq.heappush(self._due, (due_s, next(self._ticket), function))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mocked link", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread, which must not outlive the interpreter; calls that are not yet due are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > time.perf_counter()):
                    self._changed.wait(self._due[0][0] - time.perf_counter() if self._due else None)
                if self._closed:
                    return
                function = heapq.heappop(self._due)[2]
            function()


class _MockWork(dist.Work):
    """A message that can't fail."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = list(outputs)

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        """Returns None: messages of a mocked group don't fail."""

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()


class HostWork(_MockWork):
    """A message between tensors in host memory."""

    def __init__(
        self,
        op: str,
        deliver: Callable[[], None],
        outputs: Sequence[torch.Tensor],
        done_at_s: float,
        timeout: timedelta,
        clock: Clock,
    ) -> None:
        """
        Args:
            deliver: moves the data; called once, when the message completes.
            outputs: tensors that ``deliver`` fills.
            done_at_s: time at which the message completes, by ``time.perf_counter``.
            timeout: limit of waits that have no timeout of their own.
        """
        super().__init__(outputs)
        self._op = op
        self._deliver = deliver
        self._done_at_s = done_at_s
        self._timeout = timeout
        self._clock = clock
        self._delivered = False
        self._delivering = threading.Lock()
        self._future: torch.futures.Future | None = None

    def is_completed(self) -> bool:
        """Whether the message is complete; never blocks."""
        if time.perf_counter() < self._done_at_s:
            return False
        self._complete()
        return True

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Sleeps until the message is complete.

        Raises:
            RuntimeError: the message completes later than ``timeout`` from now.
        """
        timeout_s = (timeout if timeout > _NO_TIMEOUT else self._timeout).total_seconds()
        remaining_s = self._done_at_s - time.perf_counter()
        if remaining_s > timeout_s:
            time.sleep(timeout_s)
            raise RuntimeError(
                f"mocked {self._op} timed out after {timeout_s:g} s: its link needs {remaining_s - timeout_s:.3g} s "
                "more. Use a faster link or a longer timeout."
            )
        if remaining_s > 0:
            time.sleep(remaining_s)
        self._complete()
        return True

    def get_future(self) -> torch.futures.Future:
        """A future of the outputs that completes with the message, even if it is never waited for."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self.is_completed():
                self._complete_future()
            else:
                self._clock.call_at(self._done_at_s, self._complete_future)
        return self._future

    def _complete_future(self) -> None:
        assert self._future is not None
        self._complete()
        self._future.set_result(self._outputs)

    def _complete(self) -> None:
        with self._delivering:
            if not self._delivered:
                # The clock's thread records gradients by default, and senders' rows may require them.
                with torch.no_grad():
                    self._deliver()
                self._delivered = True


class DeviceWork(_MockWork):
    """A message between tensors on a CUDA device: the kernels of a paced link and an event, on one stream.

    Everything is enqueued when it is issued; a wait makes the caller's stream wait and not the host. Nothing times out.
    As NCCL since torch 2.8, an asynchronous message runs on the stream of its group behind the caller's, and a
    synchronous one on the caller's stream, which then needs no wait: with one hardware queue a wait would hold up
    whatever is enqueued behind it. Messages of one link queue on the device, on whatever streams they run.
    """

    def __init__(
        self,
        send: Callable[[], None],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        group_stream: torch.cuda.Stream | None,
    ) -> None:
        """
        Args:
            send: enqueues the message on the current stream.
            group_stream: communication stream of the group, for an asynchronous message; None for a synchronous one.
        """
        super().__init__(outputs)
        self._is_async = group_stream is not None
        self._stream = group_stream if group_stream is not None else torch.cuda.current_stream()
        if self._is_async:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            send()
            self._done = self._stream.record_event()
        if self._is_async:
            for tensor in (*inputs, *outputs):
                tensor.record_stream(self._stream)

    def is_completed(self) -> bool:
        """Whether the message is complete; never blocks."""
        return self._done.query()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Makes the current stream wait for an asynchronous message."""
        if self._is_async:
            torch.cuda.current_stream().wait_event(self._done)
        return True

    def get_future(self) -> torch.futures.Future:
        """A future of the outputs; the streams of its callbacks wait for the message."""
        future: torch.futures.Future = torch.futures.Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):
            future.set_result(self._outputs)
        return future


def refuse_one_connection() -> None:
    """Refuses to mock a link on a device whose streams share one queue.

    There an asynchronous message would hold up all work that is launched after it: its stream waits for the caller's,
    the caller's for it, and a wait at the head of the only queue stops all streams.

    Raises:
        UsageError: CUDA has one connection.
    """
    if has_one_connection():
        raise UsageError(
            f"{CONNECTIONS} is 1: mocked messages on a GPU would stop all other work, and nothing would be hidden. Set "
            f"it to {RECOMMENDED}, or unset it."
        )
