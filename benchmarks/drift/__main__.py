"""A training whose topic changes, without placement, with one at the start, and with experts that move:
python -m benchmarks.drift (as root).

All have the same model, link and text, and run in turns. The text is sources without prose, then prose, then character
tables, and again from the start. No loss balances experts. First a training without placement runs alone and records
the load of each step: from this follows what moving can gain at most, and its first steps say where experts are placed
at the start. Times include what moving takes.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.auto.cases import SAME, VARIANTS, Case, Variant
from benchmarks.auto.training import Running, set_rate, training_flags
from benchmarks.demo.data import prepare
from benchmarks.demo.folder import REPOSITORY, Folder, open_folder
from benchmarks.demo.job import Job
from benchmarks.demo.links.link import FREE_BPS, NAMESPACES, Link, link, rank_cores
from benchmarks.demo.short_run import CpuWatch
from benchmarks.demo.training_log.training_process import say
from benchmarks.drift.bound import as_text, bounds, placed, read_loads
from benchmarks.drift.text import TOPICS, write_drifting_text
from benchmarks.harness.origin import finished, origin
from benchmarks.harness.ranks import rank_environment
from benchmarks.harness.runner import RESULTS, exit_on_signals
from benchmarks.harness.samples import spread
from benchmarks.harness.tables import aligned
from megatron_lancet.cli.arguments import positive_int
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.planning.load.placement import placement_to_json

_VOCAB, _MEGABYTES = 512, 3.0
_TOPIC_BYTES = 900_000
NONE, START, MOVING = "none", "start", "moving"
PLANS = {"k1": ("--lancet-num-chunks", "1", "--lancet-pairing", "off"), "pairs": VARIANTS["pairs"].flags}
CASE = Case(
    "drift", 0.45, 4, experts=8, flags=("--moe-aux-loss-coeff", "0", "--lancet-attention", "sdpa", "--split", "100,0,0")
)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.drift", description=__doc__)
    parser.add_argument("--plan", choices=PLANS, default="pairs", help="of all variants (pairs)")
    parser.add_argument("--steps", type=positive_int, default=400, help="of each variant (400)")
    parser.add_argument("--turn", type=positive_int, default=10, help="steps of a turn; its first is not measured (10)")
    parser.add_argument("--first", type=positive_int, default=20, help="steps by whose load experts are placed (20)")
    parser.add_argument("--interval", type=positive_int, default=20, help="steps after which experts may move (20)")
    parser.add_argument("--topic-bytes", type=positive_int, default=_TOPIC_BYTES, help=f"({_TOPIC_BYTES})")
    parser.add_argument("--only-loads", action="store_true", help="record the load, print the bound, and end")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "drift", help="(runs/drift)")
    parser.add_argument("--output", type=Path, help="path of the result file, without a suffix")
    args = parser.parse_args(argv)
    if args.steps <= args.first:
        raise UsageError(f"--steps {args.steps} must be above --first {args.first}: those place experts at the start.")
    return args


class Drift:
    """All trainings of a measurement, on one link."""

    def __init__(self, args: argparse.Namespace, folder: Folder, between: Link) -> None:
        self._args = args
        self._folder = folder
        self._link = between
        self._flags = [*training_flags(folder, CASE), "--lancet-cache", str(folder.root / "profiles"), *CASE.flags]

    def start(self, stack: ExitStack, name: str, flags: Sequence[str], options: Sequence[str] = ()) -> Running:
        """Starts a training that ``stack`` ends, and waits until it is in front of its first step."""
        log = self._folder.root / f"{name}.log"
        log.unlink(missing_ok=True)
        options = ["--in-order", *options]
        job = stack.enter_context(Job(name, self._link, [*self._flags, *flags], log, options=options))
        job.wait_until_ready()
        return Running(Variant(name, tuple(flags), ""), job)

    def record(self, loads: Path) -> None:
        """Trains without placement and records the load of each step."""
        loads.unlink(missing_ok=True)
        with ExitStack() as stack:
            running = self.start(stack, "loads", PLANS[self._args.plan], ["--loads", str(loads)])
            running.run(self._args.steps)

    def measure(self, placement: Path) -> dict[str, Any]:
        """Trains all variants in turns; returns their times, for the result file."""
        args, plan = self._args, PLANS[self._args.plan]
        moving = ("--lancet-rebalance-interval", str(args.interval))
        flags = {
            NONE: plan,
            START: (*plan, "--lancet-expert-placement", str(placement)),
            MOVING: (*plan, "--lancet-expert-placement", str(placement), *moving),
        }
        with ExitStack() as stack:
            with ExitStack() as of_stock:
                rate_bps = set_rate(self.start(of_stock, "stock", VARIANTS[SAME].flags), CASE.share, self._link)
            running = [self.start(stack, name, of_variant) for name, of_variant in flags.items()]
            for turn in range(args.steps // args.turn):
                first = turn % len(running)
                for one in (*running[first:], *running[:first]):
                    one.measured.append(one.run(args.turn))
                say(f"      turn {turn + 1} of {args.steps // args.turn}")
            return {"rate_bps": rate_bps, "variants": {one.variant.name: _record(one) for one in running}}


def _record(one: Running) -> dict[str, Any]:
    lines = one.job.log.read_text(errors="replace").splitlines()
    return {
        "plan": one.steps[-1].ranks[0].plan,
        "losses": [round(step.loss, 5) for step in one.steps],
        "whole_ms": [[round(max(rank.whole_ms for rank in step.ranks), 2) for step in turn] for turn in one.measured],
        "waited_ms": [[round(step.waited_ms, 2) for step in turn] for turn in one.measured],
        "lines": [line for line in lines if line.startswith("Megatron-Lancet experts:")],
    }


def summary(measured: dict[str, Any], num_first: int) -> str:
    """The table: each variant's steps after the first ones, against the placement at the start."""
    variants = measured["variants"]
    lines = [["variant", "step (mean)", "waits", "against start (quartiles of turns)", "moves"]]

    def turns(name: str, field: str) -> list[float]:
        own = [turn[1:] or turn for turn in variants[name][field]]
        behind = own[-(-num_first // len(variants[name][field][0])) :] or own
        return [statistics.fmean(turn) for turn in behind]

    for name, record in variants.items():
        step_ms, waited_ms = turns(name, "whole_ms"), turns(name, "waited_ms")
        ratio = spread([a / b for a, b in zip(turns(START, "whole_ms"), step_ms, strict=True)])
        num_moves = sum("have changed ranks" in line for line in record["lines"])
        lines.append(
            [
                name,
                f"{statistics.fmean(step_ms):.0f} ms",
                f"{statistics.fmean(waited_ms) / statistics.fmean(step_ms):.0%}",
                f"{ratio.median:.3f} ({ratio.low:.3f}-{ratio.high:.3f})",
                str(num_moves),
            ]
        )
    return aligned(lines)


def main() -> None:
    """Entry point."""
    args = parse_arguments(sys.argv[1:])
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    folder = open_folder(args.folder.resolve())
    prepare(folder, _VOCAB, _MEGABYTES)
    say(f"      text: {', '.join(TOPICS)}, {args.topic_bytes} bytes each")
    write_drifting_text(folder, args.topic_bytes)
    found = origin("benchmarks.drift", environment=rank_environment(0))
    output = args.output or RESULTS / f"drift-{args.plan}-{found['date']}"
    loads, placement = folder.root / "loads.jsonl", folder.root / "placement.json"
    watch = CpuWatch(rank_cores())
    with link(NAMESPACES, is_unprivileged=False) as between:
        drift = Drift(args, folder, between)
        between.set_rate(FREE_BPS)
        drift.record(loads)
        steps = read_loads(loads)
        at_most = list(bounds(steps, args.first))
        print(as_text(at_most), flush=True)
        placement.write_text(placement_to_json(dict(enumerate(placed(steps[: args.first]), 1))))
        measured = {} if args.only_loads else drift.measure(placement)
    seen = watch.found()
    result = {**finished(found), "bounds": [asdict(one) for one in at_most], **measured}
    result["disturbance"] = {**asdict(seen), "is_disturbed": seen.is_disturbed}
    if measured:
        print(summary(measured, args.first))
    output.with_name(output.name + ".json").write_text(json.dumps(result) + "\n")
    print(f"written to {output}.json")


if __name__ == "__main__":
    exit_on_signals()
    run_command(main)
