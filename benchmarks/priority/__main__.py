"""All-to-alls and gradient reductions on one link: python -m benchmarks.priority (as root), or make bench-priority.

Makes two network namespaces with a shaped link between them, which carries both, lets Megatron and our variants take
turns on it, and removes them again.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness.command import add_common_arguments, check_positive, job_of, new_parser
from benchmarks.harness.job import Job
from benchmarks.harness.runner import run_benchmark
from benchmarks.harness.tables import write_results
from benchmarks.priority.cases import CASES, VARIANTS, choose
from benchmarks.priority.summary import as_markdown, as_text, summarise
from megatron_lancet.errors import run_command


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: a number out of range.
    """
    parser = new_parser("priority", __doc__, list(CASES))
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help=f"of: {', '.join(VARIANTS)} (all)")
    parser.add_argument("--repeats", type=int, default=7, help="steps of each variant in a sweep (7)")
    parser.add_argument("--sweeps", type=int, default=2, help="sweeps of each case (2)")
    add_common_arguments(parser, "priority", timeout_minutes=30)
    args = parser.parse_args(argv)
    check_positive(args, "repeats", "sweeps")
    return args


def make_job(args: argparse.Namespace, cores: Sequence[int], result: Path) -> Job:
    """What the ranks are to do.

    Raises:
        UsageError: an unknown case or variant.
    """
    return job_of(args, choose(args.cases, args.variants), args.repeats, args.sweeps, cores, result)


def main() -> None:
    """Entry point."""
    args = parse_arguments(sys.argv[1:])
    write = partial(write_results, summarise=summarise, as_text=as_text, as_markdown=as_markdown)
    run_benchmark("priority", args, make_job, write)


if __name__ == "__main__":
    run_command(main)
