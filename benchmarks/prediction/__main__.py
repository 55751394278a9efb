"""How far predicted steps are from real ones: python -m benchmarks.prediction (as root), or make bench-prediction.

Makes two network namespaces with a shaped link between them. For each case the model is profiled there, each
configuration's step is predicted from that profile; between its steps the configurations run in turns. Removes the
namespaces. A plain run takes about 40 minutes, --pairing about 15, --tiles about 14, --dispatch about 13, --nodes about
7, on two cores of 2.5 GHz.
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
from benchmarks.prediction.cases import CASES, CONFIGURATIONS, PLAIN, PRESETS, choose
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
    presets = parser.add_mutually_exclusive_group()
    for name, preset in PRESETS.items():
        presets.add_argument(f"--{name}", dest="preset", action="store_const", const=name, help=str(preset))
    defaults = "".join(f"; --{name}: {preset.repeats}" for name, preset in PRESETS.items())
    parser.add_argument(
        "--repeats",
        type=int,
        help=f"measured steps of each configuration, two in a round, with several micro-batches one "
        f"({PLAIN.repeats}{defaults})",
    )
    parser.add_argument(
        "--timelines", type=Path, metavar="FOLDER", help="also trace a step of each configuration, for comparison"
    )
    add_common_arguments(parser, "prediction", timeout_minutes=60)
    args = parser.parse_args(argv)
    check_positive(args, "repeats")
    if args.timelines is not None and not args.timelines.is_dir():
        raise UsageError(f"--timelines: no such folder: {args.timelines}")
    return args


def make_job(args: argparse.Namespace, cores: Sequence[int], result: Path) -> Job:
    """What the ranks are to do.

    Raises:
        UsageError: an unknown case or configuration, or one that can't run.
    """
    timelines = None if args.timelines is None else args.timelines.resolve()
    preset = PRESETS.get(args.preset, PLAIN)
    cases = choose(args.cases, args.configurations, preset)
    return job_of(args, cases, args.repeats or preset.repeats, 1, cores, result, timelines)


def main() -> None:
    """Entry point."""
    args = parse_arguments(sys.argv[1:])
    write = partial(write_results, summarise=compare, as_text=as_text, as_markdown=as_markdown)
    run_benchmark("prediction", args, make_job, write)


if __name__ == "__main__":
    run_command(main)
