"""Errors that are shown to the user of a command."""

import os
import select
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

USAGE_EXIT_CODE = 2
"""Exit status of a command that refused its input, the same as argparse's."""

_OUTPUTS = (1, 2)
"""File descriptors of standard output and standard error."""
_SIBLING_GRACE_S = 3.0
"""Delay before other ranks print an error: torchrun kills all ranks when the first one ends."""


class UsageError(Exception):
    """Wrong input from the user. The message says what was expected, what was found and what to do."""


class PeerError(RuntimeError):
    """A message of another rank did not arrive. The text names the op and the rank."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or read. The text gives the reason and a complete one, the same on all ranks."""


def exit_with_usage_error(message: str) -> NoReturn:
    """Print ``error: message`` once per node and end the process with status 2."""
    print_error_once_per_node(message)
    raise SystemExit(USAGE_EXIT_CODE)


def print_error_once_per_node(message: str) -> None:
    """Print ``error: message`` on stderr, as argparse does: no logging level may hide why a command ended.

    Under torchrun every rank finds the same fault: local rank 0 prints it, and the others are stopped with it. A rank
    that still runs after a delay has found a fault of its own, and prints it as well.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(_SIBLING_GRACE_S)
    print(f"error: {message}", file=sys.stderr, flush=True)


def reason_of(error: BaseException) -> str:
    """The first line of an exception's message, or the source line of one of Megatron's asserts without a message."""
    if str(error):
        return str(error).splitlines()[0]
    if error.__traceback__ is None:  # raised in another process
        return repr(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {frame.line}"


def run_command(main: Callable[[], None]) -> None:
    """Run a command's ``main``; a :class:`UsageError` becomes one line on stderr and exit status 2.

    A closed output pipe (``| head``) ends the command quietly, with status 1.

    Raises:
        BrokenPipeError: another pipe or connection is closed.
    """
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_an_output_closed():
            raise
        # Python flushes once more at exit, and would report the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except UsageError as error:
        exit_with_usage_error(str(error))


def _is_an_output_closed() -> bool:
    """Whether nobody reads an output of this process any more. A flush fails only if a buffer holds something."""
    poll = select.poll()
    for output in _OUTPUTS:
        poll.register(output, 0)  # POLLERR and POLLHUP are always reported
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
