"""Stock and pairs in Megatron-Bridge's loop and in Megatron's own, in turns: python -m benchmarks.bridge (as root).

The training is case 45-m4 of benchmarks.auto: local layers in fp32, all messages on a link whose rate the kernel caps.
It takes about six minutes.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.auto.cases import Case, Variant
from benchmarks.auto.training import Running, set_rate, training_flags, turns
from benchmarks.bridge import variants
from benchmarks.bridge.summary import as_markdown, as_text, summarise
from benchmarks.demo.data import prepare
from benchmarks.demo.folder import REPOSITORY, Folder, open_folder
from benchmarks.demo.job import Job
from benchmarks.demo.links.link import FREE_BPS, NAMESPACES, Link, link, rank_cores
from benchmarks.demo.training_log.training_process import say
from benchmarks.harness.disturbance import CpuWatch
from benchmarks.harness.origin import finished, origin
from benchmarks.harness.ranks import rank_environment
from benchmarks.harness.runner import exit_on_signals, output_path
from benchmarks.harness.tables import write_results
from megatron_lancet.cli.arguments import positive_int
from megatron_lancet.errors import run_command

_TURNS = 12
_VOCAB, _MEGABYTES = 512, 3.0
_RANK = "benchmarks.bridge.rank"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bridge", description=__doc__)
    parser.add_argument("--turns", type=positive_int, default=_TURNS, help=f"of each variant, measured ({_TURNS})")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "bridge", help="of data and logs")
    parser.add_argument("--output", type=Path, help="path of the result files, without a suffix")
    return parser.parse_args(argv)


def main() -> None:
    """Entry point."""
    args = parse_arguments(sys.argv[1:])
    path = variants.bridge_path()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    folder = open_folder(args.folder.resolve())
    prepare(folder, _VOCAB, _MEGABYTES)
    found = origin("benchmarks.bridge", environment=rank_environment(0))
    (bridge,) = distributions(name="megatron-bridge", path=[str(path)])
    found["versions"]["megatron-bridge"] = bridge.version
    output = output_path("bridge", found["date"], args.output)
    watch = CpuWatch(rank_cores())
    with link(NAMESPACES, is_unprivileged=False) as between:
        measured = _measure(folder, between, args.turns)
    seen = watch.found()
    case = {**measured, "disturbance": {**asdict(seen), "is_disturbed": seen.is_disturbed}}
    write = partial(write_results, summarise=summarise, as_text=as_text, as_markdown=as_markdown)
    write({**finished(found), "cases": [case]}, output)


def _measure(folder: Folder, between: Link, num_turns: int) -> dict[str, Any]:
    case = Case(variants.NAME, variants.SHARE, variants.MICRO_BATCHES, variants.TOPK, variants.EXPERTS)
    common = training_flags(folder, case)
    between.set_rate(FREE_BPS)
    with ExitStack() as stack:

        def start(variant: Variant, flags: Sequence[str], options: Sequence[str], **rank: Any) -> Running:
            log = folder.root / f"{variant.name}.log"
            log.unlink(missing_ok=True)
            options = [*options, *variant.options]
            job = stack.enter_context(Job(variant.name, between, flags, log, options=options, **rank))
            job.wait_until_ready()
            return Running(variant, job)

        for_rate = start(variants.FOR_RATE, [*common, *variants.FOR_RATE.flags], [])
        running = [start(variant, [*common, *variant.flags], []) for variant in variants.MEGATRON]
        in_bridge = {"module": _RANK, "import_paths": variants.import_paths()}
        running += [start(one, [], variants.bridge_options(folder), **in_bridge) for one in variants.BRIDGE]
        rate_bps = set_rate(for_rate, running, case.share, between)
        for one in running:
            say(f"      {one.variant.name}: first steps")
            one.settle()
        turns(running, num_turns)
        return {
            "name": case.name,
            "share": case.share,
            "rate_bps": rate_bps,
            "micro_batches": case.micro_batches,
            "flags": [flag.removeprefix(f"{REPOSITORY}/") for flag in common],
            "variants": {one.variant.name: one.record() for one in running},
        }


if __name__ == "__main__":
    exit_on_signals()
    run_command(main)
