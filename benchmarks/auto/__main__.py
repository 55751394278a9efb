"""Whole trainings with --lancet-plan auto, stock and fixed plans in turns: python -m benchmarks.auto (as root).

Each case trains a small GPT-MoE on the sources of Python's standard library on two CPU ranks, through Megatron's own
training: learned routing, Adam, gradient reductions and all-to-alls on one link whose rate the kernel caps. A case
takes 10 to 20 minutes.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks import te_layers
from benchmarks.auto.cases import AUTO, CASES, SAME, VARIANTS, chosen
from benchmarks.auto.summary import as_markdown, as_text, summarise
from benchmarks.auto.training import run_case
from benchmarks.demo.data import prepare
from benchmarks.demo.folder import REPOSITORY, open_folder
from benchmarks.demo.links.link import NAMESPACES, link, rank_cores
from benchmarks.demo.training_log.training_process import say
from benchmarks.harness.command import new_parser
from benchmarks.harness.disturbance import CpuWatch
from benchmarks.harness.origin import finished, origin
from benchmarks.harness.ranks import rank_environment
from benchmarks.harness.runner import exit_on_signals, output_path
from benchmarks.harness.tables import write_results
from megatron_lancet.cli.arguments import positive_int
from megatron_lancet.errors import run_command

_TURNS = 10
_VOCAB, _MEGABYTES = 512, 3.0


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = new_parser("auto", __doc__, list(CASES))
    parser.add_argument("--turns", type=positive_int, default=_TURNS, help=f"of each variant, measured ({_TURNS})")
    others = [name for name in VARIANTS if name not in (SAME, AUTO)]
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=others,
        metavar="NAME",
        help=f"beside {SAME} and {AUTO}, with a fixed plan among them (all of the case; all are in memory at once, in "
        f"bf16 with 3 GB a rank): {', '.join(others)}",
    )
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "runs" / "auto", help="of data and logs (runs/auto)"
    )
    parser.add_argument("--output", type=Path, help="path of the result files, without a suffix")
    return parser.parse_args(argv)


def main() -> None:
    """Entry point."""
    args = parse_arguments(sys.argv[1:])
    cases = [case.with_variants(args.variants or ()) for case in chosen(args.cases)]
    for case in cases:
        if case.te:
            te_layers.check_unpacked(case.name)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    folder = open_folder(args.folder.resolve())
    prepare(folder, _VOCAB, _MEGABYTES)
    found = origin("benchmarks.auto", environment=rank_environment(0))
    output = output_path("auto", found["date"], args.output)
    write = partial(write_results, summarise=summarise, as_text=as_text, as_markdown=as_markdown)
    results = []
    for case in cases:
        watch = CpuWatch(rank_cores())
        with link(NAMESPACES, is_unprivileged=False) as between:
            say(f"{case.name}: {len(case.variants)} variants")
            measured = run_case(case, folder, between, args.turns, folder.root)
        seen = watch.found()
        results.append({**measured, "disturbance": {**asdict(seen), "is_disturbed": seen.is_disturbed}})
        write({**finished(found), "cases": results}, output)  # each time: an interruption keeps the cases before it


if __name__ == "__main__":
    exit_on_signals()
    run_command(main)
