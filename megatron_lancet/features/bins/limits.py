"""``--lancet-pack-documents``: what it does not work with, and how a run deals its samples."""

import argparse
import math
from collections.abc import Iterator

from megatron_lancet.config import OWN_SPEC, LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.features.bins.flags import BinsFlags
from megatron_lancet.features.bins.step import BinSettings
from megatron_lancet.model.te.token_multiple import token_multiple
from megatron_lancet.planning.documents.cost import DocumentCost
from megatron_lancet.planning.sizes.attention import tokens_per_pair
from megatron_lancet.training.plan.support import may_overlap
from megatron_lancet.training.platform.launcher import is_mocked

FLAG = "--lancet-pack-documents"
_MOST_CHUNKS = 8
"""Chunks for which a bin has enough positions where the user does not give their number: a planner's choice."""


def check_bins(args: argparse.Namespace, config: LancetConfig) -> None:
    """
    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: the run has what does not work with bins, or a flag of bins without them.
    """
    bins = config.of(BinsFlags)
    if not bins.pack_documents:
        for flag, value in (("max-tokens", bins.pack_max_tokens), ("attention-cost", bins.pack_attention_cost)):
            if value is not None:
                raise UsageError(
                    f"--lancet-pack-{flag} {value:g} is for {FLAG}, which is off. Drop it, or pass {FLAG}."
                )
        return
    for found, why, advice in _blockers(args):
        raise UsageError(f"{FLAG} does not work with {found}: {why}. {advice}")
    multiple = _multiple(args)
    if bins.pack_max_tokens is not None and bins.pack_max_tokens % multiple:
        raise UsageError(
            f"--lancet-pack-max-tokens expects a multiple of {multiple}, the positions that the ranks of a layout or "
            f"the precision share, got {bins.pack_max_tokens}. Change it."
        )


def _blockers(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yields what does not work with bins, why, and what to do."""
    if args.spec is not None and tuple(args.spec) == OWN_SPEC:
        yield "Megatron's own script", "it reads its own batches", "Start with pretrain_gpt_moe.py, or drop the flag."
    if not args.calculate_per_token_loss:
        reason = "micro-batches have different numbers of tokens, and each token should count the same"
        yield "losses that are averaged by micro-batch", reason, "Pass --calculate-per-token-loss."
    if args.mock_data:
        yield "--mock-data", "it has no documents", "Pass --data-path."
    if args.dataloader_type != "single":
        reason = "samples are drawn step by step, in the order of their numbers"
        yield f"--dataloader-type {args.dataloader_type}", reason, "Pass --dataloader-type single."
    if args.pipeline_model_parallel_size > 1 and args.virtual_pipeline_model_parallel_size:
        reason = "each virtual stage would draw samples of its own"
        yield "virtual pipeline stages", reason, "Drop --num-virtual-stages-per-pipeline-rank, or the flag."
    if args.cuda_graph_impl != "none":
        reason = "micro-batches differ in their numbers of tokens"
        yield f"--cuda-graph-impl {args.cuda_graph_impl}", reason, "Drop one of the two."
    if is_mocked(args):
        yield "--distributed-backend mock", "other ranks draw no samples", "Drop one of the two."
    reasons = {
        "full_validation": "ranks have different numbers of samples there",
        "iterations_to_skip": "Megatron shares out skipped batches by their fixed size",
        "dataloader_fast_cache_load": "documents are divided into splits when the run starts",
        "moe_pad_expert_input_to_capacity": "it needs the same number of tokens on all ranks",
        "tp_comm_overlap": "its buffers have one size",
    }
    for name, why in reasons.items():
        if getattr(args, name, None):
            yield f"--{name.replace('_', '-')}", why, "Drop one of the two."


def _multiple(args: argparse.Namespace) -> int:
    """Number that the positions of a bin, over the ranks that share them, are a multiple of."""
    context = args.context_parallel_size
    per_rank = math.lcm(args.tensor_model_parallel_size if args.sequence_parallel else 1, token_multiple(args))
    return math.lcm(2 * context if context > 1 else 1, context * per_rank)


def most_positions(args: argparse.Namespace, bins: BinsFlags) -> int:
    """The user's bound on the positions of a bin."""
    return bins.pack_max_tokens or int(args.seq_length)


def bin_settings(args: argparse.Namespace, config: LancetConfig) -> BinSettings | None:
    """How a run deals its samples, a function of its command line alone; None without bins.

    Args:
        args: Megatron's arguments, validated, and accepted by :func:`check_bins`.
    """
    bins = config.of(BinsFlags)
    if not bins.pack_documents:
        return None
    ratio = bins.pack_attention_cost
    if ratio is None:
        # As Megatron makes its configuration of a model from them.
        groups = args.num_query_groups if args.group_query_attention else None
        sizes = argparse.Namespace(**{**vars(args), "num_moe_experts": args.num_experts, "num_query_groups": groups})
        ratio = tokens_per_pair(sizes, args.padded_vocab_size, args.hybrid_layer_pattern)
    multiple = _multiple(args)
    num_chunks = (config.num_chunks or _MOST_CHUNKS) if may_overlap(args, config) else 1
    bound = most_positions(args, bins)
    return BinSettings(
        DocumentCost(ratio),
        -(-bound // multiple) * multiple,
        multiple,
        multiple * num_chunks,
        args.pipeline_model_parallel_size,
    )


def bins_note(settings: BinSettings) -> str:
    """The lines on the bins of a run that are printed at its start."""
    return (
        f"documents dealt over all ranks by predicted time and packed, at most {settings.max_tokens} tokens in a "
        f"micro-batch; attention to a position counts as {settings.cost.tokens_per_pair:.3g} tokens"
    )
