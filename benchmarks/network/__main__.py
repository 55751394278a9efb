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
from benchmarks.network.job import Job
from benchmarks.network.runner import run_benchmark
from benchmarks.network.summary import summarise
from benchmarks.network.table import as_markdown, as_text
from megatron_lancet.errors import UsageError, run_command

_QUICK = {"repeats": 5, "sweeps": 1}
_FULL = {"repeats": 3, "sweeps": 3}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: a number out of range.
    """
    parser = argparse.ArgumentParser(
        prog="benchmarks.network", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one case, few variants, one sweep: about two minutes")
    parser.add_argument("--cases", nargs="+", default=[], metavar="CASE", help=f"of: {', '.join(CASES)} (all)")
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help=f"of: {', '.join(VARIANTS)} (the case's own)")
    parser.add_argument("--repeats", type=int, help="steps of each variant in a sweep")
    parser.add_argument("--sweeps", type=int, help="sweeps of each case")
    parser.add_argument("--rate", type=float, metavar="MBIT", help="fix the rate of the link, in Mbit/s")
    parser.add_argument("--layers", type=int, help="of the model, instead of the case's own")
    parser.add_argument("--hidden", type=int, help="hidden size, instead of the case's own")
    parser.add_argument("--seq-length", type=int, help="instead of the case's own")
    parser.add_argument("--timeout-minutes", type=float, default=75.0, help="for everything (75)")
    parser.add_argument(
        "--output", type=Path, help="results go to OUTPUT.json, .md and .png (benchmarks/results/network-DATE)"
    )
    args = parser.parse_args(argv)
    for name in ("repeats", "sweeps", "layers", "hidden", "seq_length", "rate", "timeout_minutes"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value:g}.")
    return args


def make_job(args: argparse.Namespace, cores: Sequence[int], result: Path) -> Job:
    """What the ranks are to do."""
    defaults = _QUICK if args.quick else _FULL
    sizes = {name: getattr(args, name) for name in ("layers", "hidden", "seq_length") if getattr(args, name)}
    return Job(
        cases=[
            replace(case, shape=replace(case.shape, **sizes)) for case in select(args.cases, args.variants, args.quick)
        ],
        repeats=args.repeats or defaults["repeats"],
        sweeps=args.sweeps or defaults["sweeps"],
        rate_bps=args.rate * 1e6 if args.rate else None,
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
