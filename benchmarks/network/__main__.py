"""What overlap buys on a shaped network: python -m benchmarks.network (as root), or make bench-network.

Makes two network namespaces with a shaped link between them, runs stock Megatron and our variants in turns on it, and
removes them again. All cases take about an hour and three quarters, --headline about 16 minutes, --pairing about 28,
--dispatch about 10, --tiles about 8, --nodes about 4, --load about 4, --wired about 3, --quick about 2, on two cores
of 2.5 GHz.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import add_common_arguments, check_positive, job_of, new_parser
from benchmarks.harness.job import Job
from benchmarks.harness.runner import run_benchmark
from benchmarks.harness.tables import write_results
from benchmarks.network.cases import CASES, PRESETS, VARIANTS, WHOLE, check, choose
from benchmarks.network.summary import summarise
from benchmarks.network.table import as_markdown, as_text
from megatron_lancet.errors import run_command


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: a number out of range.
    """
    parser = new_parser("network", __doc__, list(CASES))
    presets = parser.add_mutually_exclusive_group()
    for name, preset in PRESETS.items():
        presets.add_argument(f"--{name}", dest="preset", action="store_const", const=name, help=str(preset))
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help=f"of: {', '.join(VARIANTS)} (the case's own)")
    parser.add_argument("--repeats", type=int, help=f"steps of each variant in a sweep ({_defaults('repeats')})")
    parser.add_argument("--sweeps", type=int, help=f"sweeps of each case ({_defaults('sweeps')})")
    parser.add_argument("--micro-batches", type=int, help="of a step, instead of the case's own")
    add_common_arguments(parser, "network", timeout_minutes=150)
    args = parser.parse_args(argv)
    check_positive(args, "repeats", "sweeps")
    return args


def _defaults(field: str) -> str:
    """What a preset sets, for the help text."""
    others = "".join(f"; --{name}: {getattr(preset, field)}" for name, preset in PRESETS.items())
    return f"{getattr(WHOLE, field)}{others}"


def make_job(args: argparse.Namespace, cores: Sequence[int], result: Path) -> Job:
    """What the ranks are to do.

    Raises:
        UsageError: an unknown case or variant, or one that can't run.
    """
    preset = PRESETS.get(args.preset, WHOLE)
    cases = choose(args.cases, args.variants, preset)
    repeats, sweeps = args.repeats or preset.repeats, args.sweeps or preset.sweeps
    job = job_of(args, cases, repeats, sweeps, cores, result)
    check(job.cases)
    return job


def write(result: dict[str, Any], output: Path) -> None:
    """Print and write the tables, the samples and the picture."""
    from benchmarks.network.picture import draw

    write_results(result, output, summarise, as_text, as_markdown, draw)


def main() -> None:
    """Entry point."""
    args = parse_arguments(sys.argv[1:])
    run_benchmark("network", args, make_job, write)


if __name__ == "__main__":
    run_command(main)
