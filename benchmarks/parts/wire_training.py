"""Trains the long demo's model with each format of ``--lancet-wire`` over several seeds; compares validation losses.

    python -m benchmarks.parts.wire_training --output wire-training.json              # 50 steps: ten minutes
    python -m benchmarks.parts.wire_training --steps 500 --output wire-training.json  # the whole demo: an hour

Each run is the long demo with two chunks: corpus and tokenizer are prepared once, then the model is trained from
scratch. Runs of one seed begin with the same weights and see the same tokens in the same order.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.tables import aligned
from benchmarks.parts.frame import new_parser, parsed, write_result
from megatron_lancet.schedule.wire import Wire

_REPOSITORY = Path(__file__).resolve().parents[2]
_MOST_FROM_EXACT = 0.005
"""Of the exact run's validation loss, mean over the seeds."""


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=int, default=50, help="of training (50)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of weights and data (1 2 3)")
    parser.add_argument("--wires", type=Wire, nargs="+", choices=list(Wire), default=list(Wire), help="formats (all)")
    parser.add_argument(
        "--folder", type=Path, default=_REPOSITORY / "runs" / "wire", help="of the demo's files (runs/wire)"
    )
    parser.add_argument("--corpus-megabytes", type=float, help="use only the first part of the corpus")
    return parsed(parser, "wire_training")


def validation_loss(args: argparse.Namespace, wire: Wire, seed: int) -> float:
    """Trains once; nats per token on the validation split."""
    corpus = [] if args.corpus_megabytes is None else ["--corpus-megabytes", str(args.corpus_megabytes)]
    flags = ["--seed", str(seed), "--lancet-num-chunks", "2", "--lancet-wire", wire]
    command = [sys.executable, "-m", "benchmarks.demo", "--long", "--output", str(args.folder.resolve())]
    done = subprocess.run(
        [*command, "--train-iters", str(args.steps), *corpus, "--", *flags],
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"error: the demo with {' '.join(flags)} ended with status {done.returncode}: {done.stderr}")
    summary = json.loads((args.folder / "summary.json").read_text())
    loss: float = summary["validation_loss"]
    return loss


def relative_to_exact(losses: Mapping[Wire, Mapping[int, float]]) -> dict[Wire, float]:
    """Mean of each format's losses over that of the exact ones, less one.

    Args:
        losses: by format and seed, the exact ones among them.
    """
    mean = {wire: sum(by_seed.values()) / len(by_seed) for wire, by_seed in losses.items()}
    return {wire: loss / mean[Wire.EXACT] - 1 for wire, loss in mean.items()}


def main() -> None:
    """Train and print."""
    args = parse_arguments()
    wires = [Wire.EXACT, *(wire for wire in args.wires if wire is not Wire.EXACT)]
    losses: dict[Wire, dict[int, float]] = {wire: {} for wire in wires}
    deviations: dict[Wire, float] = {}
    for seed in args.seeds:
        for wire in wires:
            losses[wire][seed] = validation_loss(args, wire, seed)
            print(f"seed {seed}, {wire}: validation loss {losses[wire][seed]:.4f}", flush=True)
        deviations = relative_to_exact(losses)
        # After each seed: hours of training are not lost with the last of them.
        found: dict[str, Any] = {
            "steps": args.steps,
            "validation_loss": losses,
            "mean_relative_to_exact": deviations,
        }
        write_result(args, found)
    lines = [
        [wire, *(f"{loss:.4f}" for loss in losses[wire].values()), f"{100 * deviations[wire]:+.2f} %"] for wire in wires
    ]
    print("\n" + aligned([["wire", *(f"seed {seed}" for seed in args.seeds), "mean to exact"], *lines]))
    missed = [wire for wire in wires if abs(deviations[wire]) > _MOST_FROM_EXACT]
    print(
        f"wanted: at most {100 * _MOST_FROM_EXACT:g} % from exact{'; missed: ' + ', '.join(missed) if missed else ''}"
    )


if __name__ == "__main__":
    main()
