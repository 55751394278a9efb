"""Trains the long demo's model with each ``--lancet-comm-dtype`` over several seeds; compares validation losses.

    python -m benchmarks.parts.comm_dtype_training --output losses.json              # 50 steps: ten minutes
    python -m benchmarks.parts.comm_dtype_training --steps 500 --output losses.json  # the whole demo: an hour

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
from megatron_lancet.schedule.comm_dtype import CommDtype

_REPOSITORY = Path(__file__).resolve().parents[2]
_MOST_FROM_EXACT = 0.005
"""Of the exact run's validation loss, mean over the seeds."""


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=int, default=50, help="of training (50)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of weights and data (1 2 3)")
    parser.add_argument(
        "--formats", type=CommDtype, nargs="+", choices=list(CommDtype), default=list(CommDtype), help="formats (all)"
    )
    parser.add_argument(
        "--folder", type=Path, default=_REPOSITORY / "runs" / "comm-dtype", help="of the demo's files (runs/comm-dtype)"
    )
    parser.add_argument("--corpus-megabytes", type=float, help="use only the first part of the corpus")
    return parsed(parser, "wire_training")


def validation_loss(args: argparse.Namespace, dtype: CommDtype, seed: int) -> float:
    """Trains once; nats per token on the validation split."""
    corpus = [] if args.corpus_megabytes is None else ["--corpus-megabytes", str(args.corpus_megabytes)]
    flags = ["--seed", str(seed), "--lancet-num-chunks", "2", "--lancet-comm-dtype", dtype]
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


def relative_to_exact(losses: Mapping[CommDtype, Mapping[int, float]]) -> dict[CommDtype, float]:
    """Mean of each format's losses over the mean of the exact ones, less one.

    Args:
        losses: by format and seed, the exact ones among them.
    """
    mean = {dtype: sum(by_seed.values()) / len(by_seed) for dtype, by_seed in losses.items()}
    return {dtype: loss / mean[CommDtype.EXACT] - 1 for dtype, loss in mean.items()}


def main() -> None:
    """Train and print."""
    args = parse_arguments()
    formats = [CommDtype.EXACT, *(dtype for dtype in args.formats if dtype is not CommDtype.EXACT)]
    losses: dict[CommDtype, dict[int, float]] = {dtype: {} for dtype in formats}
    deviations: dict[CommDtype, float] = {}
    for seed in args.seeds:
        for dtype in formats:
            losses[dtype][seed] = validation_loss(args, dtype, seed)
            print(f"seed {seed}, {dtype}: validation loss {losses[dtype][seed]:.4f}", flush=True)
        deviations = relative_to_exact(losses)
        # After each seed: hours of training are not lost with the last of them.
        found: dict[str, Any] = {
            "steps": args.steps,
            "validation_loss": losses,
            "mean_relative_to_exact": deviations,
        }
        write_result(args, found)
    lines = [
        [dtype, *(f"{loss:.4f}" for loss in losses[dtype].values()), f"{100 * deviations[dtype]:+.2f} %"]
        for dtype in formats
    ]
    print("\n" + aligned([["comm-dtype", *(f"seed {seed}" for seed in args.seeds), "mean to exact"], *lines]))
    missed = [dtype for dtype in formats if abs(deviations[dtype]) > _MOST_FROM_EXACT]
    print(
        f"wanted: at most {100 * _MOST_FROM_EXACT:g} % from exact{'; missed: ' + ', '.join(missed) if missed else ''}"
    )


if __name__ == "__main__":
    main()
