"""Normalizes Megatron's arguments before they are validated, and reports every change in a line.

Megatron's flags for its own overlap are mapped to the plan, see ``flag_mapping.py``. Settings that Megatron refuses,
although the run does not depend on them, are corrected: public scripts contain them, because they were written for
another version of Megatron or for many layouts.
"""

import argparse

from megatron_lancet.config import LancetConfig
from megatron_lancet.training.plan.attention import drop_masks, uses_sdpa
from megatron_lancet.training.plan.flag_mapping import map_overlap_flags
from megatron_lancet.training.plan.support import may_overlap

_LEARNED_POSITIONS = "learned_absolute"


def normalize_args(args: argparse.Namespace, config: LancetConfig) -> list[str]:
    """Changes ``args``, which are not validated yet, in place.

    Returns:
        A line for each change.
    """
    lines = []
    if args.tokenizer_type is None and args.vocab_file and args.merge_file:
        args.tokenizer_type = "GPT2BPETokenizer"
        lines.append("--tokenizer-type is missing: GPT2BPETokenizer, which --vocab-file and --merge-file belong to")
    if args.tp_comm_overlap and args.tensor_model_parallel_size == 1:
        args.tp_comm_overlap = False
        lines.append("--tp-comm-overlap is off: without tensor parallelism there is nothing for it to overlap")
    if args.transformer_impl == "local" and args.normalization == "RMSNorm" and not args.no_persist_layer_norm:
        args.no_persist_layer_norm = True
        lines.append("--no-persist-layer-norm is on: there is no such kernel for RMSNorm")
    if args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te":
        args.cross_entropy_fusion_impl = "native"
        lines.append(
            "--cross-entropy-fusion-impl is native instead of te: this Megatron does not trust Transformer Engine's, "
            "and both compute the same loss"
        )
    if args.moe_expert_capacity_factor is not None and args.moe_expert_capacity_factor < 0:
        lines.append(f"--moe-expert-capacity-factor {args.moe_expert_capacity_factor:g} is removed: it drops no token")
        args.moe_expert_capacity_factor = None
    for feature in config.features:
        lines += feature.normalize(args, config)
    if args.dataloader_inter_document_masking and args.reset_attention_mask:
        args.reset_attention_mask = False
        lines.append("--reset-attention-mask is off: --dataloader-inter-document-masking keeps documents apart")
    if args.transformer_impl == "local" and (uses_sdpa(args, config) or may_overlap(args, config)):
        lines += drop_masks(args)
    positions, length = args.max_position_embeddings, args.seq_length
    kind = "rope" if args.use_rotary_position_embeddings else args.position_embedding_type
    if positions and length and positions < length and kind != _LEARNED_POSITIONS:
        args.max_position_embeddings = length
        lines.append(
            f"--max-position-embeddings is {length} instead of {positions}, for --seq-length {length}: "
            f"{kind} positions have no table of that size"
        )
    # After the corrections: a flag that they drop can't keep the run from overlapping.
    mapped = map_overlap_flags(args, config)
    return [*lines, mapped] if mapped else lines
