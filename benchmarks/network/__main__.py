"""What overlap buys on a shaped network: python -m benchmarks.network (as root), or make bench-network.

Makes two network namespaces with a shaped link between them, runs stock Megatron and our variants in turns on it, and
removes them again.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.network.cases import CASES, VARIANTS, select
from benchmarks.network.command import add_common_arguments, check_positive, new_parser, rate_bps_of, resized
from benchmarks.network.job import Job
from benchmarks.network.runner import run_benchmark
from benchmarks.network.summary import summarise
from benchmarks.network.table import as_markdown, as_text
from megatron_lancet.errors import run_command

_QUICK = {"repeats": 5, "sweeps": 1}
_FULL = {"repeats": 3, "sweeps": 3}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: a number out of range.
    """
    parser = new_parser("network", __doc__, list(CASES))
    parser.add_argument("--quick", action="store_true", help="one case, few variants, one sweep: about two minutes")
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help=f"of: {', '.join(VARIANTS)} (the case's own)")
    parser.add_argument("--repeats", type=int, help="steps of each variant in a sweep")
    parser.add_argument("--sweeps", type=int, help="sweeps of each case")
    add_common_arguments(parser, "network", timeout_minutes=75, suffixes=".json, .md and .png")
    args = parser.parse_args(argv)
    check_positive(args, "repeats", "sweeps")
    return args


def make_job(args: argparse.Namespace, cores: Sequence[int], result: Path) -> Job:
    """What the ranks are to do."""
    defaults = _QUICK if args.quick else _FULL
    return Job(
        cases=[
            replace(case, shape=resized(case.shape, args)) for case in select(args.cases, args.variants, args.quick)
        ],
        repeats=args.repeats or defaults["repeats"],
        sweeps=args.sweeps or defaults["sweeps"],
        rate_bps=rate_bps_of(args),
        cores=list(cores),
        result=result,
    )


def write_results(result: dict[str, Any], output: Path) -> None:
    """Print the table and write it, the samples and the picture."""
    from benchmarks.network.picture import draw

    summaries = [summarise(case) for case in result["cases"]]
    print(f"\n{as_text(summaries)}\n")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_name(output.name + ".json").write_text(json.dumps(result) + "\n")
    output.with_name(output.name + ".md").write_text(as_markdown(summaries))
    draw(summaries, output.with_name(output.name + ".png"))
    print(f"written to {output}.json, .md and .png")


def main() -> None:
    """Entry point."""
    args = parse_arguments(sys.argv[1:])
    run_benchmark("network", partial(make_job, args), args.timeout_minutes * 60, write_results, args.output)


if __name__ == "__main__":
    run_command(main)
