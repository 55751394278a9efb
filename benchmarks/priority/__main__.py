"""All-to-alls and gradient reductions on one link: python -m benchmarks.priority (as root), or make bench-priority.

Makes two network namespaces with a shaped link between them, which carries both, lets Megatron and our variants take
turns on it, and removes them again.
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
from benchmarks.priority.cases import CASES, VARIANTS, PriorityJob, select
from benchmarks.priority.summary import as_markdown, as_text, summarise
from megatron_lancet.errors import UsageError, run_command

_SIZES = ("layers", "hidden", "seq_length")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: a number out of range.
    """
    parser = argparse.ArgumentParser(
        prog="benchmarks.priority", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=[], metavar="CASE", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help=f"of: {', '.join(VARIANTS)}")
    parser.add_argument("--repeats", type=int, default=7, help="steps of each variant in a sweep (7)")
    parser.add_argument("--sweeps", type=int, default=2, help="sweeps of each case (2)")
    parser.add_argument("--rate", type=float, metavar="MBIT", help="fix the rate of the link, in Mbit/s")
    parser.add_argument("--layers", type=int, help="of the model, instead of the case's own")
    parser.add_argument("--hidden", type=int, help="hidden size, instead of the case's own")
    parser.add_argument("--seq-length", type=int, help="instead of the case's own")
    parser.add_argument("--timeout-minutes", type=float, default=30.0, help="for everything (30)")
    parser.add_argument(
        "--output", type=Path, help="results go to OUTPUT.json and .md (benchmarks/results/priority-DATE)"
    )
    args = parser.parse_args(argv)
    for name in ("repeats", "sweeps", "rate", "timeout_minutes", *_SIZES):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value:g}.")
    return args


def make_job(args: argparse.Namespace, cores: Sequence[int], result: Path) -> PriorityJob:
    """What the ranks are to do."""
    sizes = {name: getattr(args, name) for name in _SIZES if getattr(args, name)}
    return PriorityJob(
        cases=[replace(case, shape=replace(case.shape, **sizes)) for case in select(args.cases, args.variants)],
        repeats=args.repeats,
        sweeps=args.sweeps,
        rate_bps=args.rate * 1e6 if args.rate else None,
        cores=list(cores),
        result=result,
    )


def write_results(result: dict[str, Any], output: Path) -> None:
    """Print the table and write it, and the samples."""
    summaries = [summarise(case) for case in result["cases"]]
    print(f"\n{as_text(summaries)}\n")
    device = result["machine"]
    origin = (
        f"`{result['command']}`, {result['date']}, {device['cores']} cores of {device['processor']}, "
        f"torch {result['torch']}"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_name(output.name + ".json").write_text(json.dumps(result) + "\n")
    output.with_name(output.name + ".md").write_text(as_markdown(summaries, origin))
    print(f"written to {output}.json and .md")


def main() -> None:
    """Entry point."""
    args = parse_arguments(sys.argv[1:])
    run_benchmark("priority", partial(make_job, args), args.timeout_minutes * 60, write_results, args.output)


if __name__ == "__main__":
    run_command(main)
