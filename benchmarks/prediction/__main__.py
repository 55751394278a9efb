"""How far predicted steps are from real ones: python -m benchmarks.prediction (as root), or make bench-prediction.

Makes two network namespaces with a shaped link between them. For each case the model is profiled there, each
configuration's step is predicted from that profile; between its steps the configurations run in turns. Removes the
namespaces.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.network.command import (
    add_common_arguments,
    check_positive,
    new_parser,
    rate_bps_of,
    resized,
    write_tables,
)
from benchmarks.network.runner import run_benchmark
from benchmarks.prediction.cases import CASES, CONFIGURATIONS, PredictionJob, select
from benchmarks.prediction.errors import compare
from benchmarks.prediction.table import as_markdown, as_text
from megatron_lancet.errors import UsageError, run_command


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: a number out of range, or a folder that is not there.
    """
    parser = new_parser("prediction", __doc__, list(CASES))
    parser.add_argument("--configurations", nargs="+", metavar="CONFIGURATION", help=f"of: {', '.join(CONFIGURATIONS)}")
    parser.add_argument(
        "--repeats", type=int, default=12, help="measured steps of each configuration, two in a round (12)"
    )
    parser.add_argument(
        "--timelines", type=Path, metavar="FOLDER", help="also trace a step of each configuration, for comparison"
    )
    add_common_arguments(parser, "prediction", timeout_minutes=60, suffixes=".json and .md")
    args = parser.parse_args(argv)
    check_positive(args, "repeats")
    if args.timelines is not None and not args.timelines.is_dir():
        raise UsageError(f"--timelines: no such folder: {args.timelines}")
    return args


def make_job(args: argparse.Namespace, cores: Sequence[int], result: Path) -> PredictionJob:
    """What the ranks are to do."""
    return PredictionJob(
        cases=[replace(case, shape=resized(case.shape, args)) for case in select(args.cases, args.configurations)],
        repeats=args.repeats,
        rate_bps=rate_bps_of(args),
        timelines=None if args.timelines is None else args.timelines.resolve(),
        cores=list(cores),
        result=result,
    )


def main() -> None:
    """Entry point."""
    args = parse_arguments(sys.argv[1:])
    write = partial(write_tables, summarise=compare, as_text=as_text, as_markdown=as_markdown)
    run_benchmark("prediction", partial(make_job, args), args.timeout_minutes * 60, write, args.output)


if __name__ == "__main__":
    run_command(main)
