"""A thread for forwards, which takes turns with the thread of the backward: exactly one of the two runs at any time.

Autograd owns the order of a backward, and returns to its caller only at the end. So concurrent work needs a stack
of its own. On the CPU the backward runs on the thread that called it. On CUDA its nodes run on a thread of autograd,
while the caller waits inside autograd without holding the interpreter's lock: whoever holds the turn gives it away.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from queue import SimpleQueue
from typing import Any

import torch


class ForwardEnded(BaseException):
    """Unwinds a forward that is not continued, because the backward paired with it has failed."""


class Forward:
    """The forward of a micro-batch: queued, running or done.

    Attributes:
        num_turns: turns that it has taken; the present one is not counted.
        is_done: whether it has returned or raised.
    """

    def __init__(self, run: Callable[[], Any], on_cuda: bool) -> None:
        self.num_turns = 0
        self.is_done = False
        self._run: Callable[[], Any] | None = run
        self._result: Any = None
        self._settings = _thread_settings(on_cuda)

    def run(self) -> None:
        """Runs it, once, on the lane's thread. What it works on is not kept, also if it raises."""
        run, self._run = self._run, None
        assert run is not None
        with ExitStack() as stack:
            for setting in self._settings:
                stack.enter_context(setting)
            self._result = run()

    def take_result(self) -> Any:
        """Returns what it returned, once: the result holds the graph of a micro-batch."""
        assert self.is_done
        result, self._result = self._result, None
        return result


class ForwardLane:
    """One thread that runs forwards in the order in which they are added, turn by turn.

    Attributes:
        on_thread: returns a context for the thread of a forward, for those who watch operators of a thread.
    """

    on_thread: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __init__(self, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        self._queue: deque[Forward] = deque()
        self._present: Forward | None = None
        self._error: BaseException | None = None
        # A state and no count of wake-ups: an interrupted caller (Ctrl-C) can't tell what it has given or taken.
        self._has_turn = False
        self._wake_ups = {has_turn: SimpleQueue[None]() for has_turn in (False, True)}
        """Wakes the thread that waits until the lane has the turn (True), or until the lane no longer has it."""
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self._thread_number: int | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no forward is queued or running."""
        return self._present is None and not self._queue

    @property
    def native_ids(self) -> tuple[int, ...]:
        """The native number of the lane's thread; empty before it runs."""
        return () if self._thread is None or self._thread.native_id is None else (self._thread.native_id,)

    @property
    def is_here(self) -> bool:
        """Whether the caller is on the lane's thread."""
        return threading.get_ident() == self._thread_number

    def add(self, run: Callable[[], Any]) -> Forward:
        """Queues a forward. It runs with the caller's device, streams and modes, from the next turn on."""
        forward = Forward(run, self._on_cuda)
        self._queue.append(forward)
        return forward

    def run_turn(self) -> None:
        """Lets the first forward take a turn; returns when it has ended.

        Raises:
            BaseException: what the forward has raised.
        """
        assert not self.is_here
        assert not self.is_idle
        assert not self._is_ending, "the forward of a failed step did not end"
        if self._thread is None:
            # A process that fails exits without waiting for a forward that waits for other ranks.
            thread = threading.Thread(target=self._run_forwards, name="forward lane", daemon=True)
            thread.start()
            self._thread, self._thread_number = thread, thread.ident
        self._give_turn()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback has this frame: a circle would keep the failed step's tensors

    def end_turn(self) -> None:
        """Ends the turn of the forward that runs here; returns when it has the next one. Elsewhere nothing happens."""
        if self._present is None or not self.is_here:
            return
        self._present.num_turns += 1
        self._return_turn()
        self._wait_until(has_turn=True)
        if self._is_ending:
            raise ForwardEnded

    def end(self) -> None:
        """Drops queued forwards and unwinds the one that runs, because their step has failed.

        A caller that was interrupted in a turn waits here until that turn ends: for at most the transport's timeout.
        """
        self._is_ending = True
        if self._has_turn:
            self._give_turn()  # again, in case the interruption came before the lane was told
        self._queue.clear()
        while self._present is not None:
            self._give_turn()
        self._is_ending = False
        self._error = None

    def _give_turn(self) -> None:
        self._has_turn = True
        self._wake_ups[True].put(None)
        self._wait_until(has_turn=False)

    def _return_turn(self) -> None:
        self._has_turn = False
        self._wake_ups[False].put(None)

    def _wait_until(self, has_turn: bool) -> None:
        self._wake_ups[has_turn].get()
        while self._has_turn is not has_turn:  # a wake-up of an interrupted call was left
            self._wake_ups[has_turn].get()

    def _run_forwards(self) -> None:
        while True:
            self._wait_until(has_turn=True)
            forward = self._present = self._queue.popleft()
            try:
                with self.on_thread():
                    forward.run()
            except BaseException as error:  # noqa: BLE001 - raised again where the turn was given
                self._error = error
            forward.num_turns += 1
            forward.is_done = True
            self._present = None
            del forward
            self._return_turn()


def _thread_settings(on_cuda: bool) -> list[AbstractContextManager[Any]]:
    """The settings that torch keeps for each thread, as they are here; to be entered on another thread."""
    settings: list[AbstractContextManager[Any]] = [torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad()]
    if on_cuda:
        # One stream for both, so that memory and Megatron's shared buffers are used in one order.
        settings += [torch.cuda.device(torch.cuda.current_device()), torch.cuda.stream(torch.cuda.current_stream())]
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            settings.append(torch.autocast(device, torch.get_autocast_dtype(device)))
    return settings
