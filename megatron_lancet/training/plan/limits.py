"""Limits that the arguments of a run set to its plan, each with the flag that sets it."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lancet.config import AttentionChoice, LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.model.attention.sdpa import sdpa_blockers
from megatron_lancet.model.te.token_multiple import token_multiple
from megatron_lancet.planning.search.search_space import Exclusion, Limits
from megatron_lancet.schedule.chunk_sizes import most_chunks, multiple_along
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange
from megatron_lancet.training.plan.attention import DOCUMENTS_FLAG
from megatron_lancet.training.plan.dispatch import allowed_dispatches
from megatron_lancet.training.plan.support import TRANSFORMER_ENGINE, micro_batch_shape, own_samples


@dataclass(frozen=True)
class ChunkedDim:
    """A dimension along which a run's micro-batches are cut.

    Attributes:
        size: samples or positions of a micro-batch.
        flag: the flags that set ``size``.
        units: ``samples`` or ``positions``.
        multiple: sizes of chunks are multiples of this number of units.
        why: the reason for ``multiple``, as a clause; empty if that is 1.
    """

    size: int
    flag: str
    units: str
    multiple: int
    why: str

    @property
    def most_chunks(self) -> int:
        """Most chunks that a micro-batch can be cut into."""
        return most_chunks(self.size, self.multiple)


def chunked_dim(args: argparse.Namespace, config: LancetConfig, dim: ChunkDim) -> ChunkedDim:
    """How a run's micro-batches can be cut along ``dim``."""
    samples, whole = micro_batch_shape(args, config)
    positions = whole // args.context_parallel_size
    if dim is ChunkDim.BATCH:
        size, other, units = samples, positions, "samples"
        others = own_samples(args, config)
        flag = "--micro-batch-size" if others is None else others.number_set_by
    else:
        size, other, flag, units = positions, samples, "--seq-length", "positions"
        flag += " / --context-parallel-size" if args.context_parallel_size > 1 else ""
    tokens = token_multiple(args)
    multiple = multiple_along(tokens, other)
    recipe = f"--fp8-recipe {args.fp8_recipe}" if args.fp8 else f"--fp4-recipe {args.fp4_recipe}"
    why = f"{recipe} wants multiples of {multiple} {units} ({tokens} tokens) in a chunk" if multiple > 1 else ""
    return ChunkedDim(size, flag, units, multiple, why)


def sequence_blockers(args: argparse.Namespace, config: LancetConfig, overlap_range: OverlapRange) -> Iterator[str]:
    """Yields the flags with which sequence chunks in this range would change the result."""
    if args.sequence_parallel:
        yield "--sequence-parallel"
    if not overlap_range.has_attention:
        return
    if args.context_parallel_size > 1:
        yield "--context-parallel-size"
    if args.reset_attention_mask:
        yield f"--reset-attention-mask (use {DOCUMENTS_FLAG} in its place)"
    if args.transformer_impl == TRANSFORMER_ENGINE:
        if args.dataloader_inter_document_masking:
            yield f"{DOCUMENTS_FLAG} and Transformer Engine's attention"
        in_fp8 = ("fp8_dot_product_attention", "fp8_multi_head_attention")  # settings without flags
        yield from (setting for setting in in_fp8 if getattr(args, setting, False))
    yield from sdpa_blockers(args)
    if config.attention is AttentionChoice.STOCK:
        yield "--lancet-attention stock"


def sequence_refusal(blocker: str) -> UsageError:
    """The error for ``--lancet-chunk-dim sequence`` together with a flag of :func:`sequence_blockers`."""
    is_ever = blocker == "--sequence-parallel"  # which Megatron wants with tensor parallelism and experts
    advice = "Pass --lancet-chunk-dim batch" if is_ever else "Drop one of the two, or pass --lancet-range gate"
    return UsageError(f"--lancet-chunk-dim sequence does not work with {blocker}. {advice}, or --lancet-plan off.")


def routing_over_full_micro_batch(args: argparse.Namespace) -> Iterator[str]:
    """Yields the flags with which a token's route depends on other tokens, or on random numbers drawn in each call."""
    balancing, capacity = args.moe_router_load_balancing_type, args.moe_expert_capacity_factor
    kinds = balancing if isinstance(balancing, list) else [balancing]
    for kind in filter(kinds.__contains__, ("sinkhorn", "quantile_balancing")):
        yield f"--moe-router-load-balancing-type {kind}"
    for flag, is_given in {
        "--moe-expert-capacity-factor": capacity is not None and capacity >= 0,
        "--moe-input-jitter-eps": args.moe_input_jitter_eps is not None,
        "--moe-router-force-load-balancing": args.moe_router_force_load_balancing,
        "--moe-router-force-biased": args.moe_router_force_biased is not None,
    }.items():
        if is_given:
            yield flag


def planning_limits(args: argparse.Namespace, config: LancetConfig) -> Limits:
    """Combines the user's limits with the run's.

    Limits are a product of dimensions and ranges. If sequence chunks work in some ranges only, all ranges are kept and
    the dimension is excluded, unless the batch can't be cut: then only the sequence is left.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: the run does not allow what the user asks for.
    """
    excluded: list[Exclusion] = []
    ranges = [config.range] if config.range else list(OverlapRange)
    whole = ", ".join(routing_over_full_micro_batch(args))
    if whole:
        ranges = [OverlapRange.EXPERTS]
        excluded.append(Exclusion("ranges before dispatch", f"{whole} looks at the full micro-batch"))
    dims = [config.chunk_dim] if config.chunk_dim else list(ChunkDim)
    blockers = {one: next(sequence_blockers(args, config, one), None) for one in ranges}
    exact = [one for one in ranges if blockers[one] is None]
    if ChunkDim.SEQUENCE in dims and len(exact) < len(ranges):
        blocker = next(found for found in blockers.values() if found is not None)
        is_whole_batch = chunked_dim(args, config, ChunkDim.BATCH).most_chunks == 1
        if exact and (config.chunk_dim is ChunkDim.SEQUENCE or is_whole_batch):
            excluded.append(
                Exclusion(f"range={OverlapRange.STACK}", f"sequence chunks do not work there with {blocker}")
            )
            ranges = exact
        elif config.chunk_dim is ChunkDim.SEQUENCE:
            raise sequence_refusal(blocker)
        else:
            excluded.append(Exclusion("sequence chunks", f"they do not work with {blocker}"))
            dims = [ChunkDim.BATCH]
    reasons = {dim: chunked_dim(args, config, dim).why for dim in dims}
    excluded += [Exclusion(f"other sizes of chunks along {dim}", why) for dim, why in reasons.items() if why]
    dispatches, not_deduplicated = allowed_dispatches(args, config)
    limits = Limits(
        num_chunks=None if config.num_chunks is None else (config.num_chunks,),
        chunk_dims=tuple(dims),
        ranges=tuple(ranges),
        dw_policies=tuple(DwPolicy) if config.dw_policy is None else (config.dw_policy,),
        pairing=(False,),
        dispatches=dispatches,
        tiles=(0,),
        dw_memory_bytes=config.dw_memory_bytes,
        excluded=(*excluded, *not_deduplicated),
    )
    for feature in config.features:
        limits = feature.limited(limits, args, config)
    return limits
