"""How a rank ends when something went wrong: it says where it stood, and leaves without waiting for the others.

Python's and torch's own clean-up waits: process groups for the collectives that they still have in hand, which other
ranks will never answer; and gloo's threads, which report to an interpreter that is no longer there, abort the process.
So a rank that failed flushes its output and leaves.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.managers import SyncManager
from types import FrameType
from typing import NoReturn

from megatron_lancet.errors import CheckpointError, PeerError, UsageError, print_error_once_per_node, run_command

_STDERR = 2
_FAILURE_EXIT_CODE = 1
_SIGNALLED_EXIT_CODE = 128
"""Plus the number of the signal, as shells have it: 130 for Ctrl-C."""


class Whereabouts:
    """Where this rank stands, for whoever has to say so at any moment, also from another thread.

    Attributes:
        describe: the answer; None before training starts, and when it was refused.
        on_sigterm: told of SIGTERM, which then does not end the process; None where it does.
    """

    def __init__(self) -> None:
        self.describe: Callable[[], str] | None = None
        self.on_sigterm: Callable[[], None] | None = None

    def __str__(self) -> str:
        rank = os.environ.get("RANK", "0")
        return f"rank {rank}, {self.describe() if self.describe is not None else 'before training'}"

    def forget(self) -> None:
        """The rank ends for a reason that is told: a signal of the launcher has nothing to add."""
        self.describe = self.on_sigterm = None


def run_rank(main: Callable[[Whereabouts], None]) -> None:
    """Run a rank's ``main``. Any failure ends the process at once, with a status that is not 0 and a last line."""
    where = Whereabouts()

    def speak_of_usage_only() -> None:
        try:
            main(where)
        except (UsageError, CheckpointError):
            where.forget()
            raise

    with speaking_signals(where):
        try:
            run_command(speak_of_usage_only)
        except SystemExit as request:
            if request.code == 0:
                raise
            if isinstance(request.code, str):
                say(request.code)
            leave(_exit_status(request.code))
        except CheckpointError as error:
            print_error_once_per_node(str(error))
            leave(_FAILURE_EXIT_CODE)
        except PeerError as error:
            say(f"error: {error}")
            leave(_FAILURE_EXIT_CODE)
        except Exception as error:  # noqa: BLE001 what failed is told in full, only the clean-up is left out
            traceback.print_exc()
            reason = (str(error).splitlines() or [""])[0]
            say(f"error: {where}: {type(error).__name__}: {reason}")
            leave(_FAILURE_EXIT_CODE)


def _exit_status(code: str | int | None) -> int:
    """What Python makes of the argument of ``sys.exit``."""
    if code is None:
        return 0
    return code if isinstance(code, int) else _FAILURE_EXIT_CODE


def say(line: str) -> None:
    """One line to stderr, whole and at once, whatever other threads do with ``sys.stderr``."""
    os.write(_STDERR, f"{line}\n".encode())


def leave(status: int) -> NoReturn:
    """End the process without any clean-up but flushing what was printed and logged."""
    with suppress(OSError, ValueError):  # whoever read our output may be gone first
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    _exit(status)


def _exit(status: int) -> NoReturn:
    # Data loaders' workers hold copies of our sockets: until they are gone, the other ranks don't see that we are.
    # The manager of Megatron's checkpoint queue would wait for us for ever. A process that saves may go on.
    for child in multiprocessing.active_children():
        if child.daemon or child.name.startswith(SyncManager.__name__):
            child.kill()
    os._exit(status)


def _nothing(signal_number: int, frame: FrameType | None) -> None:
    """Python's part of a signal; a thread does the rest."""


def _nothing_in_child(signal_number: int, frame: FrameType | None) -> None:
    """A child that writes a checkpoint goes on, as its parent does; a daemon is there for its parent only."""
    if multiprocessing.current_process().daemon:
        os._exit(_SIGNALLED_EXIT_CODE + signal_number)


@contextmanager
def speaking_signals(where: Whereabouts) -> Iterator[None]:
    """Inside the context SIGINT (Ctrl-C) and SIGTERM end the process with one line that says where it stood.

    A SIGTERM that somebody wants to hear of (``where.on_sigterm``) does not.

    They do so also while the main thread waits inside a collective, where Python's handlers don't run: a thread of
    its own learns of the signal by a pipe. A handler that is installed later, like Megatron's
    ``--exit-signal-handler``, takes precedence.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    previous = {number: signal.signal(number, _nothing) for number in (signal.SIGINT, signal.SIGTERM)}
    previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def give_up_in_child() -> None:
        # The pipe is the parent's: a signal to a data loader's worker must not end the training.
        if _nothing in map(signal.getsignal, previous):
            signal.set_wakeup_fd(-1)
            _restore(previous)
            if where.on_sigterm is not None:
                # Schedulers signal every process, and the parent wants to save.
                signal.signal(signal.SIGTERM, _nothing_in_child)

    os.register_at_fork(after_in_child=give_up_in_child)
    watcher = threading.Thread(target=_watch, args=(read_end, where), name="signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        _restore(previous)
        os.write(write_end, b"\0")
        watcher.join()
        os.close(write_end)
        os.close(read_end)


def _restore(handlers: Mapping[signal.Signals, object]) -> None:
    for number, handler in handlers.items():
        if signal.getsignal(number) is _nothing:
            signal.signal(number, handler)  # type: ignore[arg-type]


def _watch(read_end: int, where: Whereabouts) -> None:
    """Ends the process at the first signal that is ours, or returns at a zero."""
    while True:
        number = os.read(read_end, 1)[0]
        if number == 0:
            return
        if signal.getsignal(number) is not _nothing:
            continue
        if number == signal.SIGTERM and (ask := where.on_sigterm) is not None:
            ask()
            continue
        # A launcher stops the ranks that wait beside one that refused its arguments: they have nothing to add.
        if number == signal.SIGINT or where.describe is not None:
            say(f"error: {signal.Signals(number).name} ended {where}")
        _exit(_SIGNALLED_EXIT_CODE + number)
