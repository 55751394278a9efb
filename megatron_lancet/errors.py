"""The errors that a user of a command is meant to see."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

USAGE_EXIT_CODE = 2
"""Exit status of a command that refused its input, as argparse uses it."""

_SIBLING_GRACE_S = 3.0
"""How long a silent rank outlives the speaking one: torchrun kills all ranks when the first ends."""


class UsageError(Exception):
    """Wrong input from the user. The message says what was expected, what was found and what to do."""


class PeerError(RuntimeError):
    """A message of another rank did not come. Says for which op, and which rank."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or read. Says why, and which one is complete. The same on all ranks."""


def exit_with_usage_error(message: str) -> NoReturn:
    """Print ``error: message`` once per node and end the process with status 2."""
    print_error_once_per_node(message)
    raise SystemExit(USAGE_EXIT_CODE)


def print_error_once_per_node(message: str) -> None:
    """Print ``error: message`` on stderr, as argparse does: no logging level may hide why a command ended.

    Under torchrun every rank finds the same fault: local rank 0 speaks, and the others are stopped with it. One that
    is still there after a while found a fault of its own, and speaks too.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank > 0:
        time.sleep(_SIBLING_GRACE_S)
    print(f"error: {message}", file=sys.stderr, flush=True)


def reason_of(error: BaseException) -> str:
    """The message of an exception, or the failed line where Megatron's assert has none."""
    if str(error):
        return str(error).splitlines()[0]
    if error.__traceback__ is None:  # of another process
        return repr(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {frame.line}"


def run_command(main: Callable[[], None]) -> None:
    """Run a command's ``main``; a :class:`UsageError` becomes one line on stderr and exit status 2.

    A reader of its output that goes away (``| head``) ends it quietly, with status 1.
    """
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except UsageError as error:
        exit_with_usage_error(str(error))
