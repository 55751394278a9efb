"""Runs a benchmark's ranks in their namespaces, and ends it with the status that says why."""

import json
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from benchmarks.network.namespaces import Namespaces, check_host, this_host
from benchmarks.network.ranks import RankError, run_ranks

RESULTS = Path(__file__).parents[1] / "results"


class AnyJob(Protocol):
    """What the runner asks of the ranks, as a file."""

    @property
    def result(self) -> Path:
        """Where rank 0 writes what was measured."""

    def write(self, path: Path) -> None:
        """Write it for the ranks."""


def measure_in_network(
    worker: str, make_job: Callable[[Sequence[int], Path], AnyJob], timeout_s: float
) -> tuple[dict[str, Any], BaseException | None]:
    """Run the ranks in their namespaces; what they measured, and what ended them early: a failure or an interrupt.

    Args:
        worker: the module that a rank runs.
        make_job: makes the job from the ranks' cores and the place for the result.

    Raises:
        UsageError: this machine can't run the benchmark.
        RankError, KeyboardInterrupt, SystemExit: they were ended before a case was finished.
    """
    host = this_host()
    check_host(*host)
    cores = host[-1][:2]
    with tempfile.TemporaryDirectory(prefix="lancet-network-") as folder:
        job = make_job(cores, Path(folder) / "result.json")
        job.write(Path(folder) / "job.json")
        with Namespaces() as namespaces:
            ended_by: BaseException | None = None
            try:
                run_ranks(namespaces, worker, [str(Path(folder) / "job.json")], cores, Path(folder), timeout_s)
            except (RankError, KeyboardInterrupt, SystemExit) as error:
                if not job.result.exists():
                    raise
                ended_by = error
        return json.loads(job.result.read_text()), ended_by


def run_benchmark(
    name: str,
    make_job: Callable[[Sequence[int], Path], AnyJob],
    timeout_s: float,
    write_results: Callable[[dict[str, Any], Path], None],
    output: Path | None,
) -> None:
    """All of a benchmark whose module is ``benchmarks.NAME``: run, then write what was measured and how.

    Args:
        output: results go to files of this name; None names them after the benchmark and the day.

    Raises:
        UsageError: this machine can't run it.
        SystemExit: it was ended early; what was finished is written.
    """
    exit_on_signals()
    date = time.strftime("%Y-%m-%d")
    try:
        measured, ended_by = measure_in_network(f"benchmarks.{name}.worker", make_job, timeout_s)
    except (RankError, KeyboardInterrupt) as error:
        end(error)
    command = shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])
    if ended_by is not None:
        command += f" (ended after {len(measured['cases'])} cases)"
    result = {"date": date, "command": command, "machine": machine(), **measured}
    write_results(result, output or RESULTS / f"{name}-{date}")
    if ended_by is not None:
        end(ended_by)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return {
        "processor": ", ".join(sorted(models)) or platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


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
