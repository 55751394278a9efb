"""Settings that Megatron's validation refuses by an assert without a message; here each has a sentence."""

import argparse
from collections.abc import Iterator
from itertools import chain

from megatron_lancet.errors import UsageError

_REQUIRED = ("hidden_size", "num_attention_heads", "max_position_embeddings", "seq_length", "micro_batch_size")


def check_flag_conflicts(args: argparse.Namespace) -> None:
    """Checks Megatron's arguments before it validates them.

    Raises:
        UsageError: a flag is missing, or contradicts another one; names the first found.
    """
    for conflict in chain(_missing(args), _of_training(args), _of_saves(args)):
        raise UsageError(conflict)


def _missing(args: argparse.Namespace) -> Iterator[str]:
    for name in _REQUIRED if args.skip_train else (*_REQUIRED, "lr"):
        is_given = name == "seq_length" and args.encoder_seq_length is not None
        if getattr(args, name) is None and not is_given:
            yield f"--{name.replace('_', '-')} is missing: pass it."
    if args.num_layers is None and args.hybrid_layer_pattern is None and args.hybrid_override_pattern is None:
        yield "--num-layers is missing: pass it."
    if args.train_iters is None and args.train_samples is None and not args.skip_train:
        yield "--train-iters is missing: pass it, or --train-samples."


def _of_training(args: argparse.Namespace) -> Iterator[str]:
    if args.fp16 and args.bf16:
        yield "--fp16 and --bf16 exclude each other: drop one of them."
    for name in ("micro_batch_size", "global_batch_size"):
        size = getattr(args, name)
        if size is not None and size <= 0:
            yield f"--{name.replace('_', '-')} expects at least 1, got {size}."
    if args.kv_channels is None and args.hidden_size % args.num_attention_heads:
        yield (
            f"--hidden-size {args.hidden_size} is no multiple of --num-attention-heads {args.num_attention_heads}: "
            "change one of them, or pass --kv-channels."
        )
    if args.lr is not None and args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}: change one of them."
    grows = args.weight_decay_incr_style != "constant"
    for name in ("start_weight_decay", "end_weight_decay"):
        if (getattr(args, name) is not None) != grows:
            flag = f"--{name.replace('_', '-')}"
            what = f"needs {flag}" if grows else f"excludes {flag}: drop it, or choose another style"
            yield f"--weight-decay-incr-style {args.weight_decay_incr_style} {what}."


def predicts_beside_loss(args: argparse.Namespace) -> bool:
    """Whether one stage has loss and predictions, which only ``--pipeline-model-parallel-layout`` can separate."""
    layout = args.pipeline_model_parallel_layout
    if hasattr(layout, "layout"):  # a model's own configuration has read the text
        return any(layer.name == "mtp" for layer in layout.layout[-1][-1])
    return layout is None or "m" in layout.rpartition("|")[2]


def _of_saves(args: argparse.Namespace) -> Iterator[str]:
    if args.save is None:
        return
    is_tied = args.pipeline_model_parallel_size > 1 and not args.untie_embeddings_and_output_weights
    if args.mtp_num_layers and predicts_beside_loss(args) and is_tied and args.ckpt_format != "torch":
        yield (
            "--save with --mtp-num-layers and pipeline stages needs --untie-embeddings-and-output-weights: Megatron "
            "can't save the tied weights of a stage with predictions and the loss. Pass it, or drop --mtp-num-layers."
        )
    if args.save_interval is None or args.save_interval <= 0:
        found = "" if args.save_interval is None else f", got {args.save_interval}"
        yield f"--save needs --save-interval with a number of steps of at least 1{found}."
    elif args.save_retain_interval is not None and (
        args.save_retain_interval <= 0 or args.save_retain_interval % args.save_interval
    ):
        yield (
            f"--save-retain-interval {args.save_retain_interval} must be a multiple of --save-interval "
            f"{args.save_interval}: change one of them."
        )
