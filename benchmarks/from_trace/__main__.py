"""What a trace of stock Megatron predicts: python -m benchmarks.from_trace (as root), or make bench-from-trace.

Makes two network namespaces with a shaped link between them. In turns, stock modules run under torch.profiler as
Megatron's flags start it, our model is profiled, and plans run. The profile from the traces is compared with our
profiler's, op by op and message by message, and the steps that each predicts with the real ones. Removes the
namespaces. A run takes about 5 minutes on two cores of 2.5 GHz.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.from_trace.cases import CASES, CONFIGURATIONS, DEFAULT_CASES
from benchmarks.from_trace.summary import compare
from benchmarks.from_trace.table import as_markdown, as_text
from benchmarks.harness.cases import select
from benchmarks.harness.command import add_common_arguments, check_positive, job_of, new_parser
from benchmarks.harness.job import Job
from benchmarks.harness.runner import run_benchmark
from benchmarks.harness.tables import write_results
from megatron_lancet.errors import run_command


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: a number out of range.
    """
    parser = new_parser("from_trace", __doc__, list(CASES))
    parser.add_argument("--repeats", type=int, default=12, help="measured steps of each, two in a round (12)")
    add_common_arguments(parser, "from-trace", timeout_minutes=20)
    args = parser.parse_args(argv)
    check_positive(args, "repeats")
    return args


def make_job(args: argparse.Namespace, cores: Sequence[int], result: Path) -> Job:
    """What the ranks are to do.

    Raises:
        UsageError: an unknown case.
    """
    cases = select(CASES, args.cases or DEFAULT_CASES, CONFIGURATIONS, None, noun="configuration")
    return job_of(args, cases, args.repeats, 1, cores, result)


def main() -> None:
    """Entry point."""
    args = parse_arguments(sys.argv[1:])
    write = partial(write_results, summarise=compare, as_text=as_text, as_markdown=as_markdown)
    run_benchmark("from_trace", args, make_job, write)


if __name__ == "__main__":
    run_command(main)
