"""The kind of each of the model's layers, from ``--hybrid-layer-pattern`` or ``--moe-layer-freq``."""

import argparse

from megatron.core.models.hybrid.hybrid_layer_allocation import ParsedHybridPattern, Symbols, parse_hybrid_pattern

from megatron_lancet.errors import UsageError
from megatron_lancet.schedule.layers import LayerKind, kinds_of_pattern

_STATE_SPACE = "its kernels need a GPU, where the overlap was not compared with stock"
OTHER_LAYERS = {
    Symbols.MAMBA: f"Mamba: {_STATE_SPACE}",
    Symbols.GDN: f"gated delta net: {_STATE_SPACE}",
    Symbols.DS_ATTENTION: "sparse attention: its indexer has a loss of the full micro-batch",
}
"""Symbols of ``--hybrid-layer-pattern`` whose layers the overlap does not support, each with the reason."""


def hybrid_pattern(args: argparse.Namespace) -> str | None:
    """Megatron's pattern of a hybrid model, validated or under its deprecated name; None for a GPT."""
    pattern: str | None = args.hybrid_layer_pattern or args.hybrid_override_pattern
    return pattern


def check_hybrid_pattern(args: argparse.Namespace) -> None:
    """Checks what Megatron would only find when it builds the model.

    Raises:
        UsageError: the pattern has unknown symbols, or the run has no layers of Transformer Engine.
    """
    if hybrid_pattern(args) is None:
        if args.is_hybrid_model:
            raise UsageError(
                "--is-hybrid-model needs the layers of the model: pass --hybrid-layer-pattern, or drop it."
            )
        return
    try:
        _parsed(args)
    except ValueError as error:
        raise UsageError(f"--hybrid-layer-pattern {hybrid_pattern(args)}: {error}.") from error
    if args.transformer_impl == "local":
        raise UsageError(
            "--hybrid-layer-pattern builds layers of Transformer Engine only, and --transformer-impl is local, as it "
            "is in every run without a GPU. Run it on GPUs without --transformer-impl local, or train a GPT."
        )
    if args.overlap_moe_expert_parallel_comm:  # mapping it to a plan would clear it
        raise UsageError(
            "--overlap-moe-expert-parallel-comm does not work with --hybrid-layer-pattern on Megatron's own modules: "
            "its hybrid model has no such schedule. Drop the flag, or overlap by a plan: it needs *, +, E and - "
            "layers only, expert parallelism, and no --lancet-plan off."
        )


def other_layers(args: argparse.Namespace) -> str | None:
    """The first part of a hybrid model that the overlap does not support, with the reason; None if it supports all."""
    pattern = hybrid_pattern(args) or ""
    for symbol, reason in OTHER_LAYERS.items():
        if symbol in pattern:
            return f"with {symbol} ({reason})"
    if Symbols.MTP_SEPARATOR in pattern:
        return f"with {Symbols.MTP_SEPARATOR} (multi-token prediction: it has a stack of layers of its own)"
    return None


def layer_kinds(args: argparse.Namespace) -> list[LayerKind]:
    """The kind of each layer of the model, without multi-token prediction.

    Raises:
        UsageError: a pattern has another length than the model, or layers of an unknown kind.
    """
    if hybrid_pattern(args) is not None:
        return _kinds("".join(pipeline_segments(args)))
    if not args.num_experts:
        return [LayerKind.DENSE] * args.num_layers
    freq = args.moe_layer_freq
    pattern = freq if isinstance(freq, list) else [layer % freq == 0 for layer in range(args.num_layers)]
    if len(pattern) != args.num_layers:
        raise UsageError(
            f"--moe-layer-freq is a pattern of {len(pattern)} layers, --num-layers is {args.num_layers}. Change one of "
            "them."
        )
    return [LayerKind.MOE if is_moe else LayerKind.DENSE for is_moe in pattern]


def mtp_layer_kinds(args: argparse.Namespace) -> list[LayerKind]:
    """The kind of each layer inside one layer of multi-token prediction; in a GPT there is one, like the last layer.

    Raises:
        UsageError: see :func:`layer_kinds`.
    """
    return layer_kinds(args)[-1:] if hybrid_pattern(args) is None else _kinds(_parsed(args).mtp_pattern or "")


def pipeline_segments(args: argparse.Namespace) -> list[str]:
    """The parts of a hybrid model's pattern for each virtual pipeline stage; one part if Megatron splits the layers."""
    return (_parsed(args).main_pattern or "").split(Symbols.PIPE)


def _parsed(args: argparse.Namespace) -> ParsedHybridPattern:
    return parse_hybrid_pattern(hybrid_pattern(args))


def _kinds(symbols: str) -> list[LayerKind]:
    try:
        return kinds_of_pattern(symbols)
    except ValueError as error:
        raise UsageError(
            f"--hybrid-layer-pattern: {error}; plan files and dry runs support layers *, +, E and - only."
        ) from error
