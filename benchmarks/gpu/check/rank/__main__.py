"""A rank: ``python -m benchmarks.gpu.check.rank FILE``, started by the part ``ranks`` with torchrun's variables."""

import argparse
import ctypes
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from benchmarks.gpu.check.rank.merge import SETTING
from benchmarks.gpu.check.rank.watchdog import Watchdog
from benchmarks.gpu.record import Recorder

if TYPE_CHECKING:
    from benchmarks.gpu.check.rank.place import RankPlace

_PR_SET_PDEATHSIG = 1
_SETUP_LIMIT_S = 40.0
_LEAST_LEFT_S = 3.0
"""For a case."""


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.check.rank", description=__doc__)
    parser.add_argument("file", type=Path, help="for the results of this rank")
    parser.add_argument("--limit", type=float, required=True, metavar="SECONDS", help="after which nothing is begun")
    parser.add_argument("--case-limit", type=float, required=True, metavar="SECONDS", help="that a case may take")
    parser.add_argument("--cases", nargs="*", default=[], help="whose gradients are compared")
    parser.add_argument("--timing", action="store_true", help="also time messages and steps")
    parser.add_argument("--on-cpu", action="store_true", help="over gloo")
    return parser.parse_args(words)


class StopError(Exception):
    """An error was saved that may have left this rank out of step with the others."""


@contextmanager
def stopping_at_error(record: Recorder, name: str) -> Iterator[None]:
    """Saves an error of the context as a result.

    Raises:
        StopError: there was one.
    """
    num_errors = record.num_errors
    with record.guarded(name):
        yield
    if record.num_errors > num_errors:
        raise StopError


def measure(args: argparse.Namespace, record: Recorder, watchdog: Watchdog) -> None:
    """Runs the cases and the timing.

    Raises:
        StopError: see there.
    """
    # Imports of Megatron take seconds: they belong to what has a limit.
    with ExitStack() as stack:
        with stopping_at_error(record, "set-up"), watchdog.limit("set-up", _SETUP_LIMIT_S):
            from benchmarks.gpu.check.rank import timing
            from benchmarks.gpu.check.rank.place import connected

            place = stack.enter_context(connected(args.on_cpu, watchdog))
            place.largest(0.0)
        record.add(SETTING, **place.setting())
        _compare_gradients(args, record, place)
        if args.timing:
            with stopping_at_error(record, "timing"):
                timing.time_messages(record, place)
                timing.time_steps(record, place)
        with watchdog.limit("end", _LEAST_LEFT_S):
            place.largest(0.0)


def _compare_gradients(args: argparse.Namespace, record: Recorder, place: "RankPlace") -> None:
    from benchmarks.gpu.check.rank.gradients import CASES, GradientCases, check, title_of

    runs = GradientCases(place)
    for index, name in enumerate(args.cases):
        if place.largest(_LEAST_LEFT_S - record.time_left_s()) > 0:
            record.add("left out", what=", ".join(args.cases[index:]), why="the time is up")
            break
        case, title = CASES[name], title_of(name)
        with stopping_at_error(record, title), place.watchdog.limit(title, args.case_limit):
            found = runs.run(case)
        with record.guarded(title):
            record.add(title, **check(case, found, place.num_ranks // case.replicas))


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Entry point of a rank."""
    args = parse_arguments(words)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank does not outlive the part
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    record = Recorder(args.file, args.limit)
    watchdog = Watchdog(record)
    status = 0
    try:
        measure(args, record, watchdog)
    except StopError:
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads may outlive the interpreter's shutdown, and abort it.
    os._exit(status)


if __name__ == "__main__":
    main()
