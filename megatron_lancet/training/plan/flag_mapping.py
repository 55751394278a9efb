"""Maps Megatron's flags for its own overlap to the plan."""

import argparse
import dataclasses

from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lancet.config import LancetConfig, PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.training.plan.dispatch import DEDUPLICATING_DISPATCHER, ask_for_dedup, rows_in_words
from megatron_lancet.training.plan.support import OVERLAP_FLAGS, OWN_DISPATCHER, PADDING, may_overlap

OTHER_DISPATCHERS = ("moe_enable_deepep", "moe_flex_dispatcher_", "moe_deepep_", "moe_hybridep_", "moe_ncclep_")
"""Prefixes of other dispatchers' settings: Megatron checks some of them against the dispatcher's type."""


def map_overlap_flags(args: argparse.Namespace, config: LancetConfig) -> str | None:
    """Replaces Megatron's own overlap of all-to-alls by our plan, in ``args``.

    Call it between parsing and Megatron's validation, which refuses some of these flags together with settings that
    work with a plan (full recompute, fp32, pipelines without virtual stages, no Transformer Engine). Without a plan
    (``--lancet-plan off``, no expert parallelism) nothing changes: the flags keep Megatron's meaning.

    Args:
        args: parsed by Megatron's parser, not validated; changed in place.

    Returns:
        A line for the user; None if nothing was mapped.
    """
    if not may_overlap(args, config):
        return None
    notes = []
    given = [flag for flag, name in OVERLAP_FLAGS.items() if getattr(args, name)]
    if given:
        for name in OVERLAP_FLAGS.values():
            setattr(args, name, False)
        args.wgrad_deferral_limit = 0
        note = f"the plan does what {', '.join(given)} {'asks' if len(given) == 1 else 'ask'} for"
        note += "".join(feature.take_over(given, args, config) for feature in config.features)
        notes.append(note)
    dispatcher = args.moe_token_dispatcher_type
    if dispatcher != OWN_DISPATCHER:
        notes.append(f"--moe-token-dispatcher-type {dispatcher} runs as the plan's all-to-alls")
        if dispatcher == DEDUPLICATING_DISPATCHER and config.plan is PlanChoice.AUTO and config.dispatch is None:
            ask_for_dedup(args)
            notes[-1] += f", {rows_in_words(args, config)}"
        args.moe_token_dispatcher_type = OWN_DISPATCHER
        for field in dataclasses.fields(TransformerConfig):
            if field.name.startswith(OTHER_DISPATCHERS) and hasattr(args, field.name):
                setattr(args, field.name, field.default)
    if args.moe_permute_fusion and not _has_fused_permutation():
        args.moe_permute_fusion = False
        notes.append("--moe-permute-fusion is replaced by torch's permutation: Transformer Engine 2.1 is not installed")
    notes += _padding_by_experts(args)
    if args.transformer_impl == "local" and args.context_parallel_size > 1 and args.cp_comm_type != ["p2p"]:
        notes.append(f"--cp-comm-type {' '.join(args.cp_comm_type)} is replaced by gathered keys and values")
        args.cp_comm_type, args.hierarchical_context_parallel_sizes = ["p2p"], None
    return "; ".join(notes) or None


def _has_fused_permutation() -> bool:
    """Whether Transformer Engine is installed, with the kernels that Megatron asks for."""
    kernels = (
        moe_utils.fused_permute,
        moe_utils.fused_permute_with_probs,
        moe_utils.fused_sort_chunks_by_index,
        moe_utils.fused_sort_chunks_by_index_with_probs,
        moe_utils.fused_unpermute,
    )
    return None not in kernels


def _padding_by_experts(args: argparse.Namespace) -> list[str]:
    """Leaves the padding of each expert's rows to the experts, which pad every call unless the router has done so.

    Without fp8 and fp4 the flags stay, and Megatron refuses them.
    """
    given = [f"--{name.replace('_', '-')}" for name in PADDING if getattr(args, name)]
    if not given or not (args.fp8 or args.fp4):
        return []
    for name in PADDING:
        setattr(args, name, False)
    return [f"{' '.join(given)}: rows are padded by the experts instead of the router"]


def refuse_mapped_flags(args: argparse.Namespace, config: LancetConfig) -> None:
    """Refuses the flags in a run that can't map them any more.

    Raises:
        UsageError: :func:`map_overlap_flags` would have something to map.
    """
    mapped = map_overlap_flags(argparse.Namespace(**vars(args)), config)
    if mapped:
        raise UsageError(
            f"with --spec flags can't be mapped ({mapped}): pass --moe-token-dispatcher-type {OWN_DISPATCHER} and drop "
            "the others, or start pretrain_gpt_moe.py, which maps them."
        )
