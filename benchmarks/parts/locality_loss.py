"""Trains the long demo's model with several ``--lancet-locality-loss-coeff`` on 4 ranks, taken for 2 nodes of 2.

    python -m benchmarks.parts.locality_loss --output locality-loss.json              # 500 steps: an hour
    python -m benchmarks.parts.locality_loss --steps 100 --output locality-loss.json

What a coefficient buys is the share of routed rows that leaves the node of its token, what it costs the validation
loss. Runs of one seed begin with the same weights and see the same tokens in the same order. Nothing is timed, so the
machine may be busy with other work.
"""

import argparse
import json
import re
import statistics
from pathlib import Path

from benchmarks.demo.data import prepare
from benchmarks.demo.folder import Folder, open_folder
from benchmarks.demo.long_run import Layout, launch_command, train, training_flags
from benchmarks.demo.training_log.train_log import RunLog
from benchmarks.harness.tables import aligned
from benchmarks.parts.frame import new_parser, parsed, write_result
from megatron_lancet.report.summary import REPORT_FILE

_REPOSITORY = Path(__file__).resolve().parents[2]
_RANKS, _RANKS_PER_NODE, _TOPK = 4, 2, 2
_BATCH = "--micro-batch-size 4 --global-batch-size 16"
"""The tokens of a step of the demo, on twice its ranks."""
_DIVERGENCE = re.compile(r"\| locality_loss: ([-+.\dE]+) ")
_LAST_STEPS = 10


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=int, default=500, help="of training (500)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of weights and data (1)")
    parser.add_argument("--coeffs", type=float, nargs="+", default=[0.0, 1e-3, 1e-2], help="of the loss (0 1e-3 1e-2)")
    parser.add_argument(
        "--folder", type=Path, default=_REPOSITORY / "runs" / "locality", help="of the demo's files (runs/locality)"
    )
    parser.add_argument("--corpus-megabytes", type=float, help="use only the first part of the corpus")
    return parsed(parser, "locality_loss")


def trained(folder: Folder, steps: int, coeff: float, seed: int) -> dict[str, float]:
    """Trains once.

    Returns:
        ``validation_loss`` in nats per token, ``share_leaving_node`` of the routed rows (median over the steps), and
        with a coefficient the mean ``divergence`` of the last steps, without the coefficient.
    """
    layout = Layout(_RANKS, _RANKS, f"{_RANKS} CPU ranks")
    loss = ["--lancet-locality-loss-coeff", str(coeff), "--lancet-ranks-per-node", str(_RANKS_PER_NODE)]
    flags = [*_BATCH.split(), "--seed", str(seed), "--lancet-num-chunks", "2", *loss]
    log = RunLog()
    divergences: list[float] = []

    def on_line(line: str) -> None:
        if log.feed(line) is not None:
            divergences.extend(map(float, _DIVERGENCE.findall(line)))

    command = launch_command(layout, training_flags(folder, layout, steps, flags))
    train([*command, "--lancet-report", str(folder.root)], _RANKS, folder.train_log, on_line)
    assert log.is_complete(steps), folder.train_log
    assert log.validation is not None
    report = json.loads((folder.root / REPORT_FILE).read_text())
    last = divergences[-_LAST_STEPS:]
    return {
        "validation_loss": log.validation.lm_loss,
        "share_leaving_node": report["between_nodes_rows"] / (report["num_routed_tokens"] * _TOPK),
        **({"divergence": statistics.mean(last)} if last else {}),
    }


def main() -> None:
    """Train and print."""
    args = parse_arguments()
    results: list[dict[str, float]] = []
    for seed in args.seeds:
        for coeff in args.coeffs:
            folder = open_folder(args.folder.resolve())
            prepare(folder, 2048, args.corpus_megabytes)
            results.append({"seed": seed, "coeff": coeff, **trained(folder, args.steps, coeff, seed)})
            print(json.dumps(results[-1]), flush=True)
            # After each: hours of training are not lost with the last of them.
            layout = {"ranks": _RANKS, "ranks_per_node": _RANKS_PER_NODE, "steps": args.steps}
            write_result(args, {**layout, "runs": results})
    lines = [
        [
            f"{found['coeff']:g}",
            f"{found['seed']:g}",
            f"{100 * found['share_leaving_node']:.1f} %",
            f"{found['divergence']:.3f}" if "divergence" in found else "",
            f"{found['validation_loss']:.4f}",
        ]
        for found in results
    ]
    print("\n" + aligned([["coefficient", "seed", "rows that leave", "divergence", "validation loss"], *lines]))


if __name__ == "__main__":
    main()
