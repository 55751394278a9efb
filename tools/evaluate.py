"""Computes loss and perplexity of a checkpoint of pretrain_gpt_moe.py on a data set.

The checkpoint describes its model; pass only its folder and the data: a .jsonl or .txt file, or the prefix of a dataset
that lancet data encode wrote (without .bin/.idx).

  lancet evaluate --load runs/demo/checkpoints --data my.jsonl
  torchrun --nproc-per-node 2 -m megatron_lancet evaluate --load ... --data ...    the experts on two ranks

The data is one stream, cut into windows of the length that the model was trained with, as training cuts its
validation data. A checkpoint of any number of expert-parallel ranks runs on any other that divides the number of
experts.

  torchrun --nproc-per-node 4 -m megatron_lancet evaluate --load ... --data ... --replicas 8

keeps replicas of popular experts on other ranks, so that a skewed text does not leave ranks waiting for the fullest
one; --chunks 2, or --tiles 1, computes while rows are on their way between ranks. Losses stay the same
(docs/evaluate_generate.md).
"""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from megatron_lancet.cli.arguments import positive_int, require_output_folder
from megatron_lancet.errors import UsageError
from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.inference.command import run_tool

_TIMEOUT = timedelta(minutes=10)
"""Maximum wait for another rank's message, torch's own limit for NCCL."""


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
    add(
        "--replicas",
        type=positive_int,
        metavar="R",
        help="of popular experts in each layer, on other ranks than their own; a multiple of the ranks (default: none)",
    )
    add(
        "--popularity",
        type=Path,
        metavar="FILE",
        help="choose the replicas by this measured load (lancet plan routing --expert-load) and not by a first "
        "pass over an eighth of the batches",
    )
    add(
        "--chunks",
        type=positive_int,
        default=1,
        metavar="N",
        help="cut each batch into N chunks: one computes while the rows of another are on their way (default: 1)",
    )
    add(
        "--tiles",
        type=positive_int,
        metavar="N",
        help="rows go to other ranks in N parts: experts work on what is here while the rest is on its way "
        "(default: in one message, that is waited for)",
    )
    add("--output", type=Path, metavar="FILE", help="also write the results to FILE, as JSON")
    arguments = parser.parse_args(argv)
    if arguments.popularity is not None and arguments.replicas is None:
        raise UsageError("--popularity has no effect without --replicas R: pass both or none.")
    if arguments.replicas is not None and (arguments.chunks > 1 or arguments.tiles):
        raise UsageError("--replicas runs Megatron's own layers, which have neither --chunks nor --tiles: drop one.")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command on each rank."""
    arguments = parse_arguments(argv)
    if arguments.output is not None:
        require_output_folder(arguments.output)
    # These import torch, so only after the check above.
    from megatron_lancet.inference.evaluate import evaluate, note_on_documents, read_stream
    from megatron_lancet.inference.overlap import evaluation_plan, overlap_evaluation
    from megatron_lancet.inference.replica_choice import ReplicaWish
    from megatron_lancet.inference.session import Session

    session = Session.open(arguments.load, arguments.step, arguments.tokenizer_model)
    wish = None
    if arguments.replicas is not None:
        wish = ReplicaWish.of(session.run.arguments, arguments.replicas, arguments.popularity)
    plan = None
    if arguments.chunks > 1 or arguments.tiles:
        trained = session.run.arguments
        plan = evaluation_plan(arguments.chunks, arguments.tiles or 0, arguments.batch_size, trained)
    stream = read_stream(arguments.data, session.tokenizer, arguments.json_key)
    size = arguments.batch_size, arguments.max_tokens
    with session.model() as model:
        chosen = wish.granted(model, stream, *size) if wish is not None else None
        stats = overlap_evaluation(model, plan, _TIMEOUT) if plan is not None else None
        start_s = time.monotonic()
        with chosen.replicas.active() if chosen is not None else nullcontext():
            result = evaluate(model, stream, *size)
        seconds = time.monotonic() - start_s
        times = stats.take() if stats is not None else None
        rank = model.rank
    if rank != 0:
        return
    print(f"{arguments.data}, checkpoint of step {session.run.iteration}:")
    print(f"  loss          {result.loss:.6f} nats per token")
    print(f"  perplexity    {result.perplexity:.4f}")
    print(f"  tokens        {result.num_tokens} predicted in {seconds:.1f} s")
    if result.bits_per_byte is not None:
        print(f"  per byte      {result.bits_per_byte:.4f} bits of {stream.num_text_bytes} bytes of text")
    note = note_on_documents(session.run.arguments)
    if note is not None:
        print(f"  note          {note}")
    content = {"iteration": session.run.iteration, **asdict(result)}
    if times is not None:
        waited_s = (times.exposed_ms + times.counts_exposed_ms) / 1e3
        print(f"  overlap       {plan}; waited {waited_s:.1f} s for {times.num_all_to_alls} messages")
        content |= {"plan": str(plan), "num_all_to_alls": times.num_all_to_alls, "exposed_s": waited_s}
    if chosen is not None:
        before, after = chosen.before, chosen.after
        print(
            f"  replicas      {arguments.replicas} in each layer, {chosen.replicas.num_bytes / 1e6:.1f} MB on a rank; "
            f"the fullest rank gets {after.most_over_mean:.2f} of the mean rows and not {before.most_over_mean:.2f}, "
            f"and {100 * after.sent_share:.0f} % of the rows leave their rank and not {100 * before.sent_share:.0f} %"
        )
        content |= {"replicas": arguments.replicas, "before": asdict(before), "after": asdict(after)}
    if arguments.output is not None:
        atomic_write(arguments.output, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    run_tool(main, "evaluating")
