"""Injected causes of waits, and what is found of them: python -m benchmarks.causes (as root), or make bench-causes.

Makes two network namespaces with a shaped link between them. Two ranks train a small MoE; in each run steps with and
without one injected cause take turns: skewed routing, a busy loop next to one rank, a slower link, a sleep in the
host's path. What is found in the traces is compared with the difference that was measured. Removes the namespaces.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.causes.cases import CASES, SIZES, choose
from benchmarks.causes.summary import as_markdown, as_text, summarise
from benchmarks.harness.command import add_common_arguments, check_positive, job_of, new_parser
from benchmarks.harness.job import Job
from benchmarks.harness.runner import run_benchmark
from benchmarks.harness.tables import write_results
from megatron_lancet.errors import run_command

_MAX_RUNS = min(len(sizes) for sizes in SIZES.values())


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: a number out of range.
    """
    parser = new_parser("causes", __doc__, list(CASES))
    parser.add_argument("--repeats", type=int, default=8, help="steps with and without the cause in a run (8)")
    parser.add_argument(
        "--sweeps", type=int, default=_MAX_RUNS, choices=range(1, _MAX_RUNS + 1), help=f"runs of a case ({_MAX_RUNS})"
    )
    add_common_arguments(parser, "causes", timeout_minutes=20)
    args = parser.parse_args(argv)
    check_positive(args, "repeats", "sweeps")
    return args


def make_job(args: argparse.Namespace, cores: Sequence[int], result: Path) -> Job:
    """What the ranks are to do.

    Raises:
        UsageError: an unknown case.
    """
    return job_of(args, choose(args.cases), args.repeats, args.sweeps, cores, result)


def main() -> None:
    """Entry point."""
    args = parse_arguments(sys.argv[1:])
    write = partial(write_results, summarise=summarise, as_text=as_text, as_markdown=as_markdown)
    run_benchmark("causes", args, make_job, write)


if __name__ == "__main__":
    run_command(main)
