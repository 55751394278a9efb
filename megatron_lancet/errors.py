"""The errors that a user of a command is meant to see."""

import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

USAGE_EXIT_CODE = 2
"""Exit status of a command that refused its input, as argparse uses it."""

_SIBLING_GRACE_S = 3.0
"""How long a silent rank outlives the speaking one: torchrun kills all ranks when the first ends."""


class UsageError(Exception):
    """Wrong input from the user. The message says what was expected, what was found and what to do."""


class PeerError(RuntimeError):
    """A message of another rank did not come. Says for which op, and which rank."""


def exit_with_usage_error(message: str) -> NoReturn:
    """Print ``error: message`` once per node and end the process with status 2.

    Under torchrun every rank finds the same fault: local rank 0 speaks, and the others are stopped with it. One that
    is still there after a while found a fault of its own, and speaks too.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank > 0:
        time.sleep(_SIBLING_GRACE_S)
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(USAGE_EXIT_CODE)


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
