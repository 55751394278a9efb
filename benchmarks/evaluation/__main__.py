"""Evaluation of a skewed text with replicas of experts, chunks or tiles: python -m benchmarks.evaluation (as root).

Makes two network namespaces with a shaped link between them, evaluates the same batches with all variants in turns,
and removes them again. All cases take about five minutes on two cores of 2.5 GHz, --quick about one.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.evaluation.cases import CASES, VARIANTS, choose
from benchmarks.evaluation.summary import as_markdown, as_text, summarise
from benchmarks.harness.command import add_common_arguments, check_positive, job_of, new_parser
from benchmarks.harness.job import Job
from benchmarks.harness.runner import run_benchmark
from benchmarks.harness.tables import write_results
from megatron_lancet.errors import run_command

_BATCHES, _SWEEPS = 30, 2
_QUICK_BATCHES, _QUICK_SWEEPS = 12, 1


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: a number out of range.
    """
    parser = new_parser("evaluation", __doc__, list(CASES))
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help=f"of: {', '.join(VARIANTS)} (all)")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_BATCHES} batches, {_QUICK_SWEEPS} sweep")
    parser.add_argument("--repeats", type=int, help=f"batches of the text ({_BATCHES})")
    parser.add_argument("--sweeps", type=int, help=f"passes over the text with each variant ({_SWEEPS})")
    add_common_arguments(parser, "evaluation", timeout_minutes=15)
    args = parser.parse_args(argv)
    check_positive(args, "repeats", "sweeps")
    return args


def make_job(args: argparse.Namespace, cores: Sequence[int], result: Path) -> Job:
    """What the ranks are to do.

    Raises:
        UsageError: an unknown case or variant.
    """
    repeats = args.repeats or (_QUICK_BATCHES if args.quick else _BATCHES)
    sweeps = args.sweeps or (_QUICK_SWEEPS if args.quick else _SWEEPS)
    return job_of(args, choose(args.cases, args.variants), repeats, sweeps, cores, result)


def main() -> None:
    """Entry point."""
    args = parse_arguments(sys.argv[1:])
    write = partial(write_results, summarise=summarise, as_text=as_text, as_markdown=as_markdown)
    run_benchmark("evaluation", args, make_job, write)


if __name__ == "__main__":
    run_command(main)
