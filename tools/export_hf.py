"""Writes the model of a checkpoint of pretrain_gpt_moe.py as a Hugging Face folder, by Megatron-Bridge.

  lancet export-hf --load runs/checkpoints --from-hf Qwen3-30B-A3B --output runs/hf
  torchrun --nproc-per-node 8 -m megatron_lancet export-hf --load ... --from-hf ... --output ...    experts on 8 ranks

Configuration and tokenizer are copied from the folder from which the training started (docs/features/hugging_face.md).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lancet.cli.arguments import positive_int
from megatron_lancet.inference.command import run_tool


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--load", type=Path, required=True, metavar="DIR", help="checkpoint folder (--save of the training)")
    add("--from-hf", required=True, metavar="DIR", help="folder from which the training started")
    add("--output", type=Path, required=True, metavar="DIR", help="folder to write; an older one is replaced")
    add("--step", type=positive_int, metavar="N", help="training step of the checkpoint (default: the latest)")
    return parser.parse_args(argv)


def export(args: argparse.Namespace) -> None:
    """Checks everything, then loads and writes the model."""
    from megatron_lancet.inference.checkpoint_reader import find_checkpoint, read_run
    from megatron_lancet.inference.load import check_ranks, loaded_model, number_of_ranks
    from megatron_lancet.registry import by_name
    from megatron_lancet.training.platform.detect import platform
    from megatron_lancet.training.process.console import say

    run = read_run(find_checkpoint(args.load, args.step))
    check_ranks(run, number_of_ranks())
    with platform() as found:
        writer: Any = by_name("export-hf")(args.from_hf, args.output)
        writer.check(run.arguments)
        with loaded_model(run, found.device) as model:
            writer.write(model.module)
            say(f"wrote {args.output}")


def main() -> None:
    """Entry point."""
    args = parse_arguments(None)
    run_tool(lambda: export(args), "writing a Hugging Face folder")


if __name__ == "__main__":
    main()
