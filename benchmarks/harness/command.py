"""What the command lines of benchmarks on the shaped network share."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.cases import Case
from benchmarks.harness.job import Job
from megatron_lancet.errors import UsageError

_SIZES = ("layers", "hidden", "seq_length", "micro_batches")


def new_parser(name: str, description: str | None, cases: Sequence[str]) -> argparse.ArgumentParser:
    """Of ``benchmarks.NAME``, with ``--cases``."""
    parser = argparse.ArgumentParser(
        prog=f"benchmarks.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=[], metavar="CASE", help=f"of: {', '.join(cases)} (all)")
    return parser


def add_common_arguments(parser: argparse.ArgumentParser, name: str, timeout_minutes: float) -> None:
    """Link, sizes, allocator, time limit, output."""
    parser.add_argument("--rate", type=float, metavar="MBIT", help="fix the rate of the shaped link, in Mbit/s")
    parser.add_argument("--layers", type=int, help="of the model, instead of the case's own")
    parser.add_argument("--hidden", type=int, help="hidden size, instead of the case's own")
    parser.add_argument("--seq-length", type=int, help="tokens of a sample, instead of the case's own")
    parser.add_argument(
        "--default-malloc", action="store_true", help="glibc may give memory back between steps, as it does by default"
    )
    parser.add_argument(
        "--timeout-minutes", type=float, default=timeout_minutes, help=f"for everything ({timeout_minutes:g})"
    )
    parser.add_argument(
        "--output", type=Path, help=f"path of the result files, without a suffix (benchmarks/results/{name}-DATE)"
    )


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """
    Args:
        names: in addition to :func:`add_common_arguments`.

    Raises:
        UsageError: a number that is not.
    """
    for name in (*names, "rate", "timeout_minutes", *_SIZES):
        value = getattr(args, name, None)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value:g}.")


def job_of(
    args: argparse.Namespace,
    cases: Sequence[Case],
    repeats: int,
    sweeps: int,
    cores: Sequence[int],
    result: Path,
    timelines: Path | None = None,
) -> Job:
    """What the ranks are to do, with the sizes and the rate that the command line gives."""
    sizes = {name: value for name in _SIZES if (value := getattr(args, name, None))}
    return Job(
        cases=[replace(case, shape=replace(case.shape, **sizes)) for case in cases],
        repeats=repeats,
        sweeps=sweeps,
        rate_bps=args.rate * 1e6 if args.rate else None,
        cores=list(cores),
        result=result,
        timelines=timelines,
    )
