"""What the command lines and result files of benchmarks on the shaped network have in common."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.network.cases import Shape
from megatron_lancet.errors import UsageError

_SIZES = ("layers", "hidden", "seq_length")


def new_parser(name: str, description: str | None, cases: Sequence[str]) -> argparse.ArgumentParser:
    """Of ``benchmarks.NAME``, with ``--cases``."""
    parser = argparse.ArgumentParser(
        prog=f"benchmarks.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=[], metavar="CASE", help=f"of: {', '.join(cases)} (all)")
    return parser


def add_common_arguments(parser: argparse.ArgumentParser, name: str, timeout_minutes: float, suffixes: str) -> None:
    """Link, sizes, time limit, output.

    Args:
        suffixes: of the result files, in words.
    """
    parser.add_argument("--rate", type=float, metavar="MBIT", help="fix the rate of the link, in Mbit/s")
    parser.add_argument("--layers", type=int, help="of the model, instead of the case's own")
    parser.add_argument("--hidden", type=int, help="hidden size, instead of the case's own")
    parser.add_argument("--seq-length", type=int, help="instead of the case's own")
    parser.add_argument(
        "--timeout-minutes", type=float, default=timeout_minutes, help=f"for everything ({timeout_minutes:g})"
    )
    parser.add_argument("--output", type=Path, help=f"results go to OUTPUT{suffixes} (benchmarks/results/{name}-DATE)")


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """
    Args:
        names: beside those of :func:`add_common_arguments`.

    Raises:
        UsageError: a number that is not.
    """
    for name in (*names, "rate", "timeout_minutes", *_SIZES):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value:g}.")


def resized(shape: Shape, args: argparse.Namespace) -> Shape:
    """With the sizes that the command line gives."""
    return replace(shape, **{name: getattr(args, name) for name in _SIZES if getattr(args, name)})


def rate_bps_of(args: argparse.Namespace) -> float | None:
    """In bits per second; None where the case sets it."""
    return args.rate * 1e6 if args.rate else None


def write_tables(
    result: dict[str, Any],
    output: Path,
    summarise: Callable[[dict[str, Any]], Any],
    as_text: Callable[[Sequence[Any]], str],
    as_markdown: Callable[[Sequence[Any], str], str],
) -> None:
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
