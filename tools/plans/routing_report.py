"""Shows how popular the experts of a checkpoint's layers are for a text, how that drifts, and how well it is forecast.

  lancet plan routing --load runs/demo/checkpoints --data my.jsonl
  torchrun --nproc-per-node 2 -m megatron_lancet plan routing --load ... --data ... --expert-load load.json
  lancet plan routing --loads monday.json tuesday.json wednesday.json --top 16

Each batch of the text is a window. Per layer: rows of the most popular expert over the mean, over all windows and in a
window (median); the share of the rows that the most popular experts get; the share of rows that go to another expert
than in the window before (drift); and two forecasts of a window's popularity, on the second half of the windows: that
it is what the last window was, and what Lina's path table says, which is profiled on the first half. "error" is the
mean absolute error of an expert's share, "other top" the share of windows whose most popular experts are others than
the forecast's.

--loads takes files with measured loads instead, each a window, as lancet plan experts takes them. These have no
choices of tokens, so there is no path table. docs/evaluate_generate.md says more.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_lancet.cli.arguments import positive_int, require_output_folder
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.plan_text.routing_table import routing_table
from megatron_lancet.planning.load.expert_load import ExpertLoad, LayerLoad, read_expert_load
from megatron_lancet.planning.load.routing_report import (
    LayerRouting,
    default_num_top,
    routing_of_choices,
    routing_of_loads,
)

_FROM_CHECKPOINT = ("data", "step", "tokenizer_model", "max_tokens", "expert_load")
"""Arguments that say something of a checkpoint or its text."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line.

    Raises:
        UsageError: neither a checkpoint with a text nor loads are given, or both are.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--load", type=Path, metavar="DIR", help="checkpoint folder (--save of the training)")
    add("--data", metavar="DATA", help="FILE.jsonl, FILE.txt, or the prefix of a .bin/.idx dataset")
    add("--loads", type=Path, nargs="+", metavar="FILE", help="measured loads, each a window")
    add("--step", type=positive_int, metavar="N", help="training step of the checkpoint (default: the latest)")
    add("--tokenizer-model", type=Path, metavar="FILE", help="current path of the tokenizer (default: as in training)")
    add("--json-key", default="text", metavar="KEY", help="key of the text in a .jsonl (default: text)")
    add("--max-tokens", type=positive_int, metavar="N", help="use only the first N tokens (default: all)")
    add("--batch-size", type=positive_int, default=8, metavar="N", help="samples of a window and rank (default: 8)")
    add(
        "--top",
        type=positive_int,
        metavar="N",
        help="experts that count as the most popular (default: Lina's 2 k, for k experts of a token, at most half)",
    )
    add("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    add(
        "--expert-load",
        type=Path,
        metavar="FILE",
        help="also write the rows by layer, rank and expert to FILE, as lancet plan experts and lancet evaluate "
        "--popularity read them",
    )
    args = parser.parse_args(argv)
    for output in filter(None, (args.json, args.expert_load)):
        require_output_folder(output)
    _check_input(args)
    return args


def _check_input(args: argparse.Namespace) -> None:
    if args.loads is None:
        for name in ("load", "data"):
            if getattr(args, name) is None:
                raise UsageError(f"--{name} is missing: pass a checkpoint and a text, or --loads FILE ...")
        return
    for name in ("load", *_FROM_CHECKPOINT):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} has no effect with --loads: drop one of the two.")
    if args.top is None:
        raise UsageError(
            "--loads says nothing of the experts of a token: pass --top N, twice their number for example."
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command on each rank."""
    args = parse_arguments(argv)
    if args.loads is not None:
        windows = _windows_of(args.loads)
        _show(args, routing_of_loads(windows, args.top), args.top, f"{len(windows)} measured loads", {})
        return
    from megatron_lancet.inference.routing import routed_windows  # imports torch, so after the checks above
    from megatron_lancet.inference.session import Session

    session = Session.open(args.load, args.step, args.tokenizer_model)
    arguments = session.run.arguments
    num_experts = arguments.num_experts or 0
    if not num_experts:
        raise UsageError(f"{session.run.folder} holds a model without experts: nothing is routed.")
    found = routed_windows(session, args.data, args.json_key, args.batch_size, args.max_tokens)
    if found is None:  # on other ranks than the first
        return
    num_top = args.top or default_num_top(num_experts, arguments.moe_router_topk)
    layers = routing_of_choices(found.windows, num_experts, num_top)
    num_tokens = sum(len(next(iter(window.values()))) for window in found.windows)
    title = (
        f"{args.data}, checkpoint of step {session.run.iteration}: {num_tokens} tokens in {len(found.windows)} "
        f"windows, {num_experts} experts, {arguments.moe_router_topk} of a token"
    )
    if args.expert_load is not None:
        rows = tuple(LayerLoad(layer, by_rank) for layer, by_rank in sorted(found.rows.items()))
        atomic_write(args.expert_load, ExpertLoad(len(found.windows), arguments.num_layers, rows).to_json())
    _show(args, layers, num_top, title, {"iteration": session.run.iteration, "num_tokens": num_tokens})


def _windows_of(paths: Sequence[Path]) -> list[dict[int, tuple[int, ...]]]:
    """Rows of each expert by layer, of each file."""
    loads = []
    for path in paths:
        try:
            loads.append(read_expert_load(path))
        except RecordError as error:
            raise UsageError(str(error)) from error
    windows = [{layer.layer: layer.rows_per_expert for layer in load.layers} for load in loads]
    first = loads[0]
    if not first.layers:
        raise UsageError(f"{paths[0]} has no layer with experts.")
    for path, load, window in zip(paths, loads, windows, strict=True):
        if (load.num_experts, window.keys()) != (first.num_experts, windows[0].keys()):
            raise UsageError(f"{path} is the load of another model than {paths[0]}: layers or experts differ.")
    return windows


def _show(
    args: argparse.Namespace, layers: Sequence[LayerRouting], num_top: int, title: str, facts: dict[str, Any]
) -> None:
    """Prints the table, and writes everything where the user asks for it."""
    print("\n".join([title, *routing_table(layers, num_top)]))
    if args.json is not None:
        content = {**facts, "num_top": num_top, "layers": [asdict(layer) for layer in layers]}
        atomic_write(args.json, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    import sys

    if "--loads" in sys.argv:
        run_command(main)
    else:
        from megatron_lancet.inference.command import run_tool

        run_tool(main, "recording routes")
