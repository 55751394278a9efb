"""Documents of the standard library in padded, first-fit and balanced bins: python -m benchmarks.bins (as root).

Makes data sets of them, then two network namespaces with a shaped link between them, runs the same steps with all
variants in turns, and removes the namespaces again. All cases take about ten minutes on two cores of 2.5 GHz, --quick
about two.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.bins.cases import CASES, VARIANTS, choose
from benchmarks.bins.data import prepare
from benchmarks.bins.summary import as_markdown, as_text, summarise
from benchmarks.harness.command import add_common_arguments, check_positive, job_of, new_parser
from benchmarks.harness.job import Job
from benchmarks.harness.runner import run_benchmark
from benchmarks.harness.tables import write_results
from megatron_lancet.errors import run_command

_STEPS, _SWEEPS = 10, 1
_QUICK_STEPS, _QUICK_SWEEPS = 3, 1


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: a number out of range.
    """
    parser = new_parser("bins", __doc__, list(CASES))
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help=f"of: {', '.join(VARIANTS)} (all)")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_STEPS} steps, {_QUICK_SWEEPS} sweep")
    parser.add_argument("--repeats", type=int, help=f"steps, each with its own documents ({_STEPS})")
    parser.add_argument("--sweeps", type=int, help=f"passes over the steps with each variant ({_SWEEPS})")
    parser.add_argument("--micro-batches", type=int, help="bins of a step on a rank, instead of the case's own")
    add_common_arguments(parser, "bins", timeout_minutes=25)
    args = parser.parse_args(argv)
    check_positive(args, "repeats", "sweeps")
    return args


def make_job(args: argparse.Namespace, cores: Sequence[int], result: Path) -> Job:
    """What the ranks are to do, with the data sets that they need.

    Raises:
        UsageError: an unknown case or variant, or a tool failed.
    """
    cases = choose(args.cases, args.variants)
    repeats = args.repeats or (_QUICK_STEPS if args.quick else _STEPS)
    sweeps = args.sweeps or (_QUICK_SWEEPS if args.quick else _SWEEPS)
    job = job_of(args, cases, repeats, sweeps, cores, result)
    data = result.parent / "data"
    prepare(data, [case.name for case in cases])
    return replace(job, data=data)


def main() -> None:
    """Entry point."""
    args = parse_arguments(sys.argv[1:])
    write = partial(write_results, summarise=summarise, as_text=as_text, as_markdown=as_markdown)
    run_benchmark("bins", args, make_job, write)


if __name__ == "__main__":
    run_command(main)
