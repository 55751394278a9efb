"""Files that are written completely or not at all."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

_SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
"""Exit status that shells show for a process which SIGTERM ended."""


@contextmanager
def atomic_outputs(*targets: Path) -> Iterator[list[Path]]:
    """Write several files of one result under temporary names, then move all of them into place.

    Args:
        targets: final paths; their folders must exist (see ``cli/arguments.py``).

    Yields:
        One temporary path per target, in the same folder (a move is atomic only within one file system). The body
        creates, fills and closes every one of them.

    If the body raises anything, Ctrl-C and SIGTERM included, the temporaries are removed and older targets stay as
    they were. Only SIGKILL or a power cut can leave a temporary (``.NAME.PID.tmp``). A process that has a SIGTERM
    handler keeps it.
    """
    temporaries = [target.with_name(f".{target.name}.{os.getpid()}.tmp") for target in targets]
    with _sigterm_raises_exit():
        try:
            yield temporaries
            with _interrupts_deferred() if len(targets) > 1 else nullcontext():
                for temporary, target in zip(temporaries, targets, strict=True):
                    temporary.replace(target)
        finally:
            for temporary in temporaries:
                temporary.unlink(missing_ok=True)


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file; a reader sees the old content or all of the new content.

    Raises:
        OSError: the folder does not exist or can't be written.
    """
    with atomic_outputs(path) as (temporary,):
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def _sigterm_raises_exit() -> Iterator[None]:
    """Makes SIGTERM unwind the stack, so that ``finally`` blocks run, unless the process has a handler."""
    is_main = threading.current_thread() is threading.main_thread()  # only that one may set signal handlers
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def exit_on_signal(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(_SIGTERM_EXIT_CODE)

    previous = signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM back, so that they cannot separate a new ``.bin`` from its ``.idx``.

    Uses handlers, not a signal mask: a mask holds for one thread, and any other thread would receive the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    held = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(signum, lambda received, _: caught.append(received)) for signum in held]
    try:
        yield
    finally:
        for signum, handler in zip(held, previous, strict=True):
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        if caught:
            signal.raise_signal(caught[0])
