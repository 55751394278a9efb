"""How a failed or signalled rank exits: it prints one line with its status and does not wait for the others.

Python's and torch's own clean-up can hang or crash: process groups wait for pending collectives that other ranks will
never answer, and gloo's threads abort the process when they report to an interpreter that is gone. So a rank that
failed flushes its output and exits at once.

torchrun ends with a report of its own. It shows the message of each rank, which the rank writes to a file that torchrun
names, and at last the message with the earliest time.
"""

import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.managers import SyncManager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megatron_lancet.errors import (
    USAGE_EXIT_CODE,
    CheckpointError,
    PeerError,
    UsageError,
    print_error_once_per_node,
    run_command,
)

_STDERR = 2
_FAILURE_EXIT_CODE = 1
_SIGNALLED_EXIT_CODE = 128
"""Plus the number of the signal, as shells have it: 130 for Ctrl-C."""
_LOST_PEER = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
"""Words of gloo and NCCL."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file whose message torchrun reports for this rank."""


class RankStatus:
    """Thread-safe status of this rank, for error messages.

    Attributes:
        describe: returns how far the rank is; None before training starts, and after the run was refused.
        on_sigterm: called at SIGTERM, which then does not end the process; None if SIGTERM ends it.
        is_stopping: whether a SIGTERM has come that a handler of Megatron's took.
    """

    def __init__(self) -> None:
        self.describe: Callable[[], str] | None = None
        self.on_sigterm: Callable[[], None] | None = None
        self.is_stopping = False

    def __str__(self) -> str:
        rank = os.environ.get("RANK", "0")
        return f"rank {rank}, {self.describe() if self.describe is not None else 'before training'}"

    def clear(self) -> None:
        """Report no more signals: the rank exits for a reason that is printed, and is signalled afterwards."""
        self.describe = self.on_sigterm = None


def run_rank(main: Callable[[RankStatus], None]) -> None:
    """Run a rank's ``main``. Any failure ends the process at once, with a nonzero status and one last line."""
    status = RankStatus()

    def run_main() -> None:
        try:
            main(status)
        except (UsageError, CheckpointError) as error:
            status.clear()
            # Megatron may have a handler of its own, which lets the rank go on when a launcher stops it.
            signal.signal(signal.SIGTERM, _noop_handler)
            if status.is_stopping and int(os.environ.get("LOCAL_RANK", "0")) > 0:
                signal.raise_signal(signal.SIGTERM)
            refuse_now(error)

    with log_and_exit_on_signal(status):
        try:
            run_command(run_main)
        except SystemExit as request:
            if request.code == 0:
                raise
            if isinstance(request.code, str):
                _report_to_launcher(request.code)
                say(request.code)
                exit_now(_FAILURE_EXIT_CODE)
            exit_now(request.code or 0)  # Python ends with 0 where ``sys.exit`` has no argument
        except PeerError as error:
            _report_to_launcher(f"error: {error}", follows_another=True)
            say(f"error: {error}")
            exit_now(_FAILURE_EXIT_CODE)
        except Exception as error:  # noqa: BLE001 the traceback is printed in full, only the clean-up is skipped
            traceback.print_exc()
            reason = (str(error).splitlines() or [""])[0]
            line = f"error: {status}: {type(error).__name__}: {reason}"
            _report_to_launcher(line, follows_another=is_lost_peer(error))
            say(line)
            exit_now(_FAILURE_EXIT_CODE)


def is_lost_peer(error: BaseException) -> bool:
    """Returns whether gloo or NCCL report that another rank closed its connection."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_PEER)


def refuse_now(error: UsageError | CheckpointError) -> NoReturn:
    """End the process with the error's line, which is printed once per node."""
    found_s = time.time()
    print_error_once_per_node(str(error))
    _report_to_launcher(f"error: {error}", found_s)
    exit_now(USAGE_EXIT_CODE if isinstance(error, UsageError) else _FAILURE_EXIT_CODE)


def _report_to_launcher(line: str, found_s: float | None = None, follows_another: bool = False) -> None:
    """Write why this rank ends to torchrun's file, if there is one.

    Args:
        found_s: time of the failure, seconds since 1970; None for now.
        follows_another: whether the rank ends because another rank has failed. torchrun compares whole seconds, and
            takes the lowest of equally early ranks for the cause: this rank's time is then a second later.
    """
    file = os.environ.get(_ERROR_FILE)
    if not file:
        return
    timestamp = int(time.time() if found_s is None else found_s) + follows_another
    # torchrun prints the text of this name, which is meant for a traceback.
    details = {"py_callstack": line, "timestamp": str(timestamp)}
    # An earlier failure of this rank stays: it is the cause of a later one.
    with suppress(OSError), Path(file).open("x", encoding="utf-8") as report:
        json.dump({"message": {"message": line, "extraInfo": details}}, report)


def say(line: str) -> None:
    """Write one line to stderr at once and in one piece, whatever other threads do with ``sys.stderr``."""
    os.write(_STDERR, f"{line}\n".encode())


def exit_now(status: int) -> NoReturn:
    """End the process; flush what was printed and logged, and skip all other clean-up."""
    with suppress(OSError, ValueError):  # the reader of our output may have exited first
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    _exit(status)


def _exit(status: int) -> NoReturn:
    # Data loaders' workers hold copies of our sockets: the other ranks notice our end only when the workers have ended.
    # The manager of Megatron's checkpoint queue would wait for us forever. A process that saves may go on.
    for child in multiprocessing.active_children():
        if child.daemon or child.name.startswith(SyncManager.__name__):
            child.kill()
    os._exit(status)


def _noop_handler(signal_number: int, frame: FrameType | None) -> None:
    """Makes Python write the signal's number into the wakeup pipe; a thread reads it and acts."""


def _exit_if_daemon(signal_number: int, frame: FrameType | None) -> None:
    """Ends a daemon, which serves only its parent; a child that writes a checkpoint goes on, like its parent."""
    if multiprocessing.current_process().daemon:
        os._exit(_SIGNALLED_EXIT_CODE + signal_number)


@contextmanager
def log_and_exit_on_signal(status: RankStatus) -> Iterator[None]:
    """Inside the context SIGINT (Ctrl-C) and SIGTERM end the process with one line that gives its status.

    A SIGTERM calls ``status.on_sigterm`` instead where that is set.

    This works also while the main thread waits inside a collective, where Python's handlers don't run: a separate
    thread reads the signal from a pipe. A handler that is installed later, like Megatron's
    ``--exit-signal-handler``, takes precedence.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    previous = {number: signal.signal(number, _noop_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def reset_signals_in_child() -> None:
        # The pipe is the parent's: a signal to a data loader's worker must not end the training.
        if _noop_handler in map(signal.getsignal, previous):
            signal.set_wakeup_fd(-1)
            _restore(previous)
            if status.on_sigterm is not None:
                # Schedulers signal every process, and the parent wants to save.
                signal.signal(signal.SIGTERM, _exit_if_daemon)

    os.register_at_fork(after_in_child=reset_signals_in_child)
    watcher = threading.Thread(target=_watch, args=(read_end, status), name="signals", daemon=True)
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
        if signal.getsignal(number) is _noop_handler:
            signal.signal(number, handler)  # type: ignore[arg-type]


def _watch(read_end: int, status: RankStatus) -> None:
    """Ends the process at the first signal that has our handler; returns when it reads a zero."""
    while True:
        number = os.read(read_end, 1)[0]
        if number == 0:
            return
        if signal.getsignal(number) is not _noop_handler:
            status.is_stopping |= number == signal.SIGTERM
            continue
        if number == signal.SIGTERM and (ask := status.on_sigterm) is not None:
            ask()
            continue
        # A launcher stops the ranks that wait next to one that refused its arguments: they print nothing.
        line = f"{signal.Signals(number).name} ended {status}"
        _report_to_launcher(line, follows_another=True)
        if number == signal.SIGINT or status.describe is not None:
            say(f"error: {line}")
        _exit(_SIGNALLED_EXIT_CODE + number)
