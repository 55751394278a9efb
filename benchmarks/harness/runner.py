"""Runs a benchmark's ranks in their namespaces, and ends it with the status that says why."""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from benchmarks.harness.job import Job
from benchmarks.harness.namespaces import NUM_NODES, Namespaces, check_host, this_host
from benchmarks.harness.origin import finished, origin
from benchmarks.harness.ranks import RankError, rank_environment, run_ranks
from megatron_lancet.errors import UsageError

RESULTS = Path(__file__).parents[1] / "results"
_WORKER = "benchmarks.harness.worker"


def measure_in_network(
    name: str, make_job: Callable[[Sequence[int], Path], Job], timeout_s: float, default_malloc: bool
) -> tuple[dict[str, Any], BaseException | None]:
    """Run the ranks in their namespaces; what they measured, and what ended them early: a failure or an interrupt.

    Cases that need different processes are measured group by group; see :meth:`Job.by_processes`.

    Args:
        name: of the benchmark.
        make_job: makes the job from the ranks' cores and the place for the result.
        timeout_s: for all groups together.
        default_malloc: see :func:`rank_environment`.

    Raises:
        UsageError: this machine can't run the benchmark.
        RankError, KeyboardInterrupt, SystemExit: they were ended before a case was finished.
    """
    host = this_host()
    check_host(*host)
    cores = host[-1][:NUM_NODES]
    until_s = time.monotonic() + timeout_s
    cases: list[dict[str, Any]] = []
    ended_by: BaseException | None = None
    with tempfile.TemporaryDirectory(prefix="lancet-network-") as folder:
        path = Path(folder) / "job.json"
        for job in make_job(cores, Path(folder) / "result.json").by_processes():
            job.write(path)
            try:
                with Namespaces(ranks_per_node=job.ranks_per_node) as network:
                    left_s = until_s - time.monotonic()
                    run_ranks(network, _WORKER, [name, str(path)], cores, Path(folder), left_s, default_malloc)
            except (RankError, KeyboardInterrupt, SystemExit) as error:
                ended_by = error
            if job.result.exists():
                cases += json.loads(job.result.read_text())["cases"]
            if ended_by is not None:
                break
    if ended_by is not None and not cases:
        raise ended_by
    return {"cases": cases}, ended_by


def run_benchmark(
    name: str,
    args: argparse.Namespace,
    make_job: Callable[[argparse.Namespace, Sequence[int], Path], Job],
    write_results: Callable[[dict[str, Any], Path], None],
) -> None:
    """All of a benchmark whose package is ``benchmarks.NAME``: run, then write what was measured and how.

    Args:
        args: with the flags of :func:`benchmarks.harness.command.add_common_arguments`.
        make_job: what the ranks are to do, from ``args``, the cores and the path of the result.

    Raises:
        UsageError: this machine can't run it, or the default result file exists.
        SystemExit: it was ended early; what was finished is written.
    """
    exit_on_signals()
    try:
        found = origin(f"benchmarks.{name}", environment=rank_environment(0, args.default_malloc))
        output = output_path(name, found["date"], args.output)
        timeout_s = args.timeout_minutes * 60
        measured, ended_by = measure_in_network(name, partial(make_job, args), timeout_s, args.default_malloc)
    except (RankError, KeyboardInterrupt) as error:
        end(error)
    result = {**finished(found), "is_complete": ended_by is None, **measured}
    write_results(result, output)
    if ended_by is not None:
        end(ended_by)


def output_path(name: str, date: str, given: Path | None) -> Path:
    """Path of the result files, without a suffix.

    Raises:
        UsageError: none is given, and an earlier run of this day has written to the default path.
    """
    path = given or RESULTS / f"{name}-{date}"
    file = path.with_name(f"{path.name}.json")
    if given is None and file.exists():
        raise UsageError(f"{file} is the result of an earlier run. Pass --output PATH, or move that file.")
    return path


def exit_on_signals() -> None:
    """SIGTERM and SIGHUP become SystemExit: on the way out everything is cleaned up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)


def _terminated(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def end(reason: BaseException) -> NoReturn:
    """Ends the benchmark with the status that says why."""
    if isinstance(reason, SystemExit):
        raise reason
    if isinstance(reason, KeyboardInterrupt):
        print("interrupted; the namespaces are removed", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT)
    print(f"error: {reason}", file=sys.stderr)
    raise SystemExit(1) from reason
