"""How far predicted steps are from real ones: python -m benchmarks.prediction (as root), or make bench-prediction.

Makes two network namespaces with a shaped link between them. For each case the model is profiled there, each
configuration's step is predicted from that profile; between its steps the configurations run in turns. Removes the
namespaces.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.network.runner import run_benchmark
from benchmarks.prediction.cases import CASES, CONFIGURATIONS, PredictionJob, select
from benchmarks.prediction.errors import compare
from benchmarks.prediction.table import as_markdown, as_text
from megatron_lancet.errors import UsageError, run_command

_SIZES = ("layers", "hidden", "seq_length")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: a number out of range, or a folder that is not there.
    """
    parser = argparse.ArgumentParser(
        prog="benchmarks.prediction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=[], metavar="CASE", help=f"of: {', '.join(CASES)} (all)")
    parser.add_argument("--configurations", nargs="+", metavar="CONFIGURATION", help=f"of: {', '.join(CONFIGURATIONS)}")
    parser.add_argument(
        "--repeats", type=int, default=12, help="measured steps of each configuration, two in a round (12)"
    )
    parser.add_argument("--rate", type=float, metavar="MBIT", help="fix the rate of the link, in Mbit/s")
    parser.add_argument("--layers", type=int, help="of the model, instead of the case's own")
    parser.add_argument("--hidden", type=int, help="hidden size, instead of the case's own")
    parser.add_argument("--seq-length", type=int, help="instead of the case's own")
    parser.add_argument(
        "--timelines", type=Path, metavar="FOLDER", help="also trace a step of each configuration, for comparison"
    )
    parser.add_argument("--timeout-minutes", type=float, default=45.0, help="for everything (45)")
    parser.add_argument(
        "--output", type=Path, help="results go to OUTPUT.json and .md (benchmarks/results/prediction-DATE)"
    )
    args = parser.parse_args(argv)
    for name in ("repeats", "rate", "timeout_minutes", *_SIZES):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value:g}.")
    if args.timelines is not None and not args.timelines.is_dir():
        raise UsageError(f"--timelines: no such folder: {args.timelines}")
    return args


def make_job(args: argparse.Namespace, cores: Sequence[int], result: Path) -> PredictionJob:
    """What the ranks are to do."""
    sizes = {name: getattr(args, name) for name in _SIZES if getattr(args, name)}
    return PredictionJob(
        cases=[replace(case, shape=replace(case.shape, **sizes)) for case in select(args.cases, args.configurations)],
        repeats=args.repeats,
        rate_bps=args.rate * 1e6 if args.rate else None,
        timelines=None if args.timelines is None else args.timelines.resolve(),
        cores=list(cores),
        result=result,
    )


def write_results(result: dict[str, Any], output: Path) -> None:
    """Print the table and write it, and the samples."""
    errors = [compare(case) for case in result["cases"]]
    print(f"\n{as_text(errors)}\n")
    device = result["machine"]
    origin = (
        f"`{result['command']}`, {result['date']}, {device['cores']} cores of {device['processor']}, "
        f"torch {result['torch']}"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_name(output.name + ".json").write_text(json.dumps(result) + "\n")
    output.with_name(output.name + ".md").write_text(as_markdown(errors, origin))
    print(f"written to {output}.json and .md")


def main() -> None:
    """Entry point."""
    args = parse_arguments(sys.argv[1:])
    run_benchmark("prediction", partial(make_job, args), args.timeout_minutes * 60, write_results, args.output)


if __name__ == "__main__":
    run_command(main)
