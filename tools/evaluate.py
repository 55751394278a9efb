"""Computes loss and perplexity of a checkpoint of pretrain_gpt_moe.py on a data set.

The checkpoint describes its model; pass only its folder and the data: a .jsonl or .txt file, or the prefix of a dataset
that tools/preprocess_data.py wrote (without .bin/.idx).

  python tools/evaluate.py --load runs/demo/checkpoints --data my.jsonl
  torchrun --nproc-per-node 2 tools/evaluate.py --load ... --data ...    the experts on two ranks

The data is one stream, cut into windows of the length that the model was trained with, as training cuts its
validation data. A checkpoint of any number of expert-parallel ranks runs on any other that divides the number of
experts.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_lancet.cli.arguments import positive_int, require_output_folder
from megatron_lancet.files import atomic_write
from megatron_lancet.inference.command import run_tool


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--load", type=Path, required=True, metavar="DIR", help="checkpoint folder (--save of the training)")
    add("--data", required=True, metavar="DATA", help="FILE.jsonl, FILE.txt, or the prefix of a .bin/.idx dataset")
    add("--step", type=positive_int, metavar="N", help="training step of the checkpoint (default: the latest)")
    add("--tokenizer-model", type=Path, metavar="FILE", help="current path of the tokenizer (default: as in training)")
    add("--json-key", default="text", metavar="KEY", help="key of the text in a .jsonl (default: text)")
    add("--max-tokens", type=positive_int, metavar="N", help="use only the first N tokens (default: all)")
    add(
        "--batch-size", type=positive_int, default=8, metavar="N", help="windows per forward pass and rank (default: 8)"
    )
    add("--output", type=Path, metavar="FILE", help="also write the results to FILE, as JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command on each rank."""
    arguments = parse_arguments(argv)
    if arguments.output is not None:
        require_output_folder(arguments.output)
    from megatron_lancet.inference.evaluate import evaluate, read_stream  # imports torch, so after the check above
    from megatron_lancet.inference.session import Session

    session = Session.open(arguments.load, arguments.step, arguments.tokenizer_model)
    stream = read_stream(arguments.data, session.tokenizer, arguments.json_key)
    with session.model() as model:
        start_s = time.monotonic()
        result = evaluate(model, stream, arguments.batch_size, arguments.max_tokens)
        seconds = time.monotonic() - start_s
        rank = model.rank
    if rank != 0:
        return
    print(f"{arguments.data}, checkpoint of step {session.run.iteration}:")
    print(f"  loss          {result.loss:.6f} nats per token")
    print(f"  perplexity    {result.perplexity:.4f}")
    print(f"  tokens        {result.num_tokens} predicted in {seconds:.1f} s")
    if result.bits_per_byte is not None:
        print(f"  per byte      {result.bits_per_byte:.4f} bits of {stream.num_text_bytes} bytes of text")
    if arguments.output is not None:
        content = {"iteration": session.run.iteration, **asdict(result)}
        atomic_write(arguments.output, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    run_tool(main, "evaluating")
