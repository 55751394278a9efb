"""Which plan a run gets, and which configurations the overlapping block refuses."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron_lancet.config import AttentionChoice, LancetConfig, PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, fixed_plan
from megatron_lancet.schedule.reductions import CommPriority
from megatron_lancet.training.plan.explicit import plan_from_file, wishes
from megatron_lancet.training.plan.limits import (
    against_sequence_chunks,
    chunked_size,
    lacking_in_sdpa,
    planning_limits,
    routing_over_whole_micro_batch,
)

_DEFAULT_NUM_CHUNKS = 2
OWN_DISPATCHER = "alltoall"
"""Megatron's name for the way in which tokens travel here."""
OVERLAP_FLAGS = {
    "--overlap-moe-expert-parallel-comm": "overlap_moe_expert_parallel_comm",
    "--delay-wgrad-compute": "delay_wgrad_compute",
    "--overlap-dispatch-backward-with-experts-wgrad": "overlap_dispatch_backward_with_experts_wgrad",
    "--moe-shared-expert-overlap": "moe_shared_expert_overlap",
    "--ep-overlap-early-attn-memory-release": "ep_overlap_early_attn_memory_release",
    "--defer-embedding-wgrad-compute": "defer_embedding_wgrad_compute",
}
"""Switches that ask for all-to-alls, or weight gradients, beside other work; and their names among the arguments."""
OWN_SPEC = ("megatron_lancet.training.spec", "overlapped_gpt")
"""What Megatron's ``--spec`` names to get the overlapping block."""
_RECOMPUTABLE = {"core_attn", "mlp", "moe", "shared_experts"}
"""The others (layernorm, mla_up_proj, moe_act) fail in stock too without Transformer Engine."""


def choose_plan(args: argparse.Namespace, config: LancetConfig) -> tuple[Plan | None, str]:
    """The plan of a run, or None for stock modules, and one line that says which and why.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: the run asks for overlap together with something that it does not support.
    """
    _check_attention(args, config)
    if isinstance(config.plan, Path):
        plan = plan_from_file(config.plan, args, config)
        _refuse_unsupported(args)
        return plan, "; ".join([f"{plan} from {config.plan}", *_dropout_note(args, plan)])
    if config.plan is PlanChoice.OFF:
        return None, "off: stock Megatron modules"
    if not _has_all_to_alls(args):
        if config.num_chunks not in (None, 1):
            raise UsageError(
                f"--lancet-num-chunks {config.num_chunks} overlaps the all-to-all of expert parallelism, but there "
                f"is none: --expert-model-parallel-size is {args.expert_model_parallel_size}. Drop the flag."
            )
        return None, "nothing to overlap without expert parallelism: stock Megatron modules"
    obstacles = against_overlap(args, config, validated=True)
    if obstacles:
        return None, f"off: {'; '.join(obstacles)}. Stock Megatron modules, nothing of ours is overlapped"
    notes = []
    overlap_range = config.range or OverlapRange.STACK
    whole = ", ".join(routing_over_whole_micro_batch(args))
    if whole and overlap_range is not OverlapRange.EXPERTS:
        overlap_range = OverlapRange.EXPERTS
        notes.append(f"chunks start after the gate, because {whole} looks at the whole micro-batch")
    plan = _cut(args, config, overlap_range)
    _refuse_unsupported(args)
    segment = plan.segments[0]
    if segment.num_chunks == 1 and config.num_chunks is None and segment.chunk_dim is ChunkDim.BATCH:
        obstacle = next(against_sequence_chunks(args, config, overlap_range), "--lancet-chunk-dim batch")
        notes.append(f"a micro-batch of 1 stays whole, because sequence chunks do not work with {obstacle}")
    return plan, "; ".join([str(plan), *notes, *_dropout_note(args, plan)])


def may_overlap(args: argparse.Namespace, config: LancetConfig) -> bool:
    """Whether a plan will run, unless the run is refused; else modules stay stock.

    Args:
        args: Megatron's arguments, validated or not.
    """
    if isinstance(config.plan, Path):
        return True
    return config.plan is not PlanChoice.OFF and _has_all_to_alls(args) and not against_overlap(args, config)


def _has_all_to_alls(args: argparse.Namespace) -> bool:
    return bool(args.num_experts) and args.expert_model_parallel_size > 1


def against_overlap(args: argparse.Namespace, config: LancetConfig, validated: bool = False) -> list[str]:
    """Why a run that leaves the choice to us keeps stock modules, each with what to change; empty where it overlaps.

    Who asks for a number of chunks, a range, a profile or the like wants the overlap, and is refused instead.

    Args:
        validated: whether flags that mean the plan should be mapped by now.
    """
    wants_overlap = any(wishes(config)) or config.profile or config.comm_priority is not CommPriority.OFF
    if config.plan is not PlanChoice.AUTO or wants_overlap:
        return []
    obstacles = [*unsupported(args), *(_unmapped(args) if validated else ())]
    return [f"{flag} does not work with the overlapping block yet ({advice})" for flag, advice in obstacles]


def _refuse_unsupported(args: argparse.Namespace) -> None:
    for flag, advice in (*unsupported(args), *_unmapped(args)):
        raise UsageError(f"{flag} does not work with the overlapping block yet: {advice}, or --lancet-plan off.")


def _dropout_note(args: argparse.Namespace, plan: Plan) -> list[str]:
    chunked = any(segment.num_chunks > 1 and segment.range.has_attention for segment in plan.segments)
    if chunked and (args.hidden_dropout > 0 or args.attention_dropout > 0):
        return ["dropout draws its random numbers chunk by chunk, so losses differ from stock's by chance"]
    return []


def is_tuned(args: argparse.Namespace, config: LancetConfig) -> bool:
    """Whether a run that overlaps looks for its plan by itself; else :func:`choose_plan`'s runs from the start.

    A number of chunks is taken for the wish of a fixed plan; a run for a profile ends before it would need one; and
    where the limits leave only one there is no choice.

    Raises:
        UsageError: a wish of the user that the run does not allow.
    """
    if config.plan is not PlanChoice.AUTO or config.num_chunks is not None or config.profile is not None:
        return False
    limits = planning_limits(args, config)
    can_be_cut = any(chunked_size(args, dim)[0] > 1 for dim in limits.chunk_dims)
    return can_be_cut or limits.dw_policies != (DwPolicy.NONE,)


def needs_own_attention(args: argparse.Namespace) -> str | None:
    """The flag for which Megatron has no core attention without Transformer Engine, so that ours is used; or None."""
    if args.transformer_impl != "local":
        return None
    if args.context_parallel_size > 1:
        return f"--context-parallel-size {args.context_parallel_size}"
    return "--multi-latent-attention" if args.multi_latent_attention else None


def uses_sdpa(args: argparse.Namespace, config: LancetConfig) -> bool:
    """Whether the user asks for the fused attention kernel, or for what only works with it.

    Sequence chunks bring it by themselves.
    """
    return config.attention is AttentionChoice.SDPA or needs_own_attention(args) is not None


def _check_attention(args: argparse.Namespace, config: LancetConfig) -> None:
    """Refuses a core attention that can't do what the model needs."""
    need = needs_own_attention(args)
    if need and config.attention is AttentionChoice.STOCK:
        raise UsageError(
            f"--lancet-attention stock does not work with {need}: Megatron's local core attention takes heads of one "
            "size and sees one rank's tokens only. Drop the flag, or pass --lancet-attention sdpa."
        )
    lacks = lacking_in_sdpa(args)
    if uses_sdpa(args, config) and lacks:
        raise UsageError(
            f"{lacks[0]} does not work with torch's fused attention, which {need or '--lancet-attention sdpa'} brings. "
            "Drop one of the two."
        )


def _cut(args: argparse.Namespace, config: LancetConfig, overlap_range: OverlapRange) -> Plan:
    """Along which dimension, into how many chunks: two where nobody asks, the fewest that overlap."""
    num_chunks = config.num_chunks or _DEFAULT_NUM_CHUNKS
    obstacles = list(against_sequence_chunks(args, config, overlap_range))
    dim = config.chunk_dim
    if dim is None:
        fits = num_chunks <= args.micro_batch_size
        dim = ChunkDim.BATCH if fits or obstacles else ChunkDim.SEQUENCE
        if not fits and obstacles and config.num_chunks is None:
            num_chunks = args.micro_batch_size
    if dim is ChunkDim.SEQUENCE and num_chunks > 1 and obstacles:
        raise UsageError(
            f"--lancet-chunk-dim sequence does not work with {obstacles[0]}. Drop one of the two, or pass "
            "--lancet-range gate, or --lancet-plan off."
        )
    size, flag = chunked_size(args, dim)
    if num_chunks > size:
        if config.num_chunks is None:
            num_chunks = size
        else:
            why_not = f" (sequence chunks would do, but for {obstacles[0]})" if obstacles else ""
            raise UsageError(
                f"--lancet-num-chunks {num_chunks} is more than the micro-batch can be cut into along the {dim} "
                f"dimension: {flag} is {size}{why_not}. Use at most {size} chunks"
                + (", a larger micro-batch, or --lancet-chunk-dim auto." if dim is ChunkDim.BATCH else ".")
            )
    return fixed_plan(num_chunks, config.dw_policy or DwPolicy.FILL, dim, overlap_range, _dw_memory_bytes(config))


def _dw_memory_bytes(config: LancetConfig) -> int | None:
    if config.dw_memory_mb is None:
        return None
    if config.dw_policy is DwPolicy.NONE:
        raise UsageError(
            f"--lancet-dw-memory-mb {config.dw_memory_mb:g} bounds deferred weight gradients, but --lancet-dw-policy "
            "none defers none. Drop one of the two."
        )
    return max(1, round(config.dw_memory_mb * 1e6))


def unsupported(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """What a run asks for that the overlapping block lacks: (flag, what to do about it).

    Args:
        args: Megatron's arguments, after :func:`~megatron_lancet.training.plan.flag_mapping.map_overlap_flags`.
    """
    yield from _unsupported_parallelism(args)
    yield from _unsupported_layers(args)
    yield from _unsupported_memory_savers(args)
    yield from _unsupported_logs(args)


def _unmapped(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Flags that mean the plan, and still stand: sizes that Megatron takes from a checkpoint come after the mapping."""
    if args.moe_token_dispatcher_type != OWN_DISPATCHER:
        dispatcher = f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type}"
        yield dispatcher, f"pass --moe-token-dispatcher-type {OWN_DISPATCHER}"
    for flag, name in OVERLAP_FLAGS.items():
        if getattr(args, name):
            yield flag, "drop it, the plan does what it asks for"


def _unsupported_parallelism(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    tensor_size = args.tensor_model_parallel_size
    for flag, num_shards, num_ranks in (
        ("--tensor-parallel-num-weight-shards", args.tensor_parallel_num_weight_shards, tensor_size),
        (
            "--expert-tensor-parallel-num-weight-shards",
            args.expert_tensor_parallel_num_weight_shards,
            args.expert_tensor_parallel_size or tensor_size,
        ),
    ):
        if num_shards is not None and num_shards > num_ranks:
            yield f"{flag} {num_shards}", "use expert, tensor, context, data and pipeline parallelism"
    for flag, given in {
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
    }.items():
        if given:
            yield flag, "use --use-distributed-optimizer"
    if args.fake_process_group:
        yield "--fake-process-group", "use --distributed-backend mock"
    if args.lazy_mpu_init:
        yield "--lazy-mpu-init", "drop it"


_NEED_TRANSFORMER_ENGINE = {
    "--tp-comm-overlap": "tp_comm_overlap",
    "--use-te-activation-func": "use_te_activation_func",
    "--use-transformer-engine-op-fuser": "use_transformer_engine_op_fuser",
    "--te-precision-config-file": "te_precision_config_file",
    "--moe-single-grouped-weight": "moe_single_grouped_weight",
    "--moe-single-grouped-bias": "moe_single_grouped_bias",
    "--use-grouped-gemm-for-shared-expert": "use_grouped_gemm_for_shared_expert",
    "--use-grouped-gemm-for-dense-mlp": "use_grouped_gemm_for_dense_mlp",
    "--moe-mlp-glu-interleave-size": "moe_mlp_glu_interleave_size",
    "--moe-shared-expert-glu-interleave-size": "moe_shared_expert_glu_interleave_size",
    "--fused-residual-rmsnorm": "fused_residual_rmsnorm",
    "--mla-down-proj-fusion": "mla_down_proj_fusion",
    "--fp8-output-proj": "fp8_output_proj",
    "--symmetric-ar-type": "symmetric_ar_type",
    "--use-kitchen-attention": "use_kitchen_attention",
    "--qk-clip": "qk_clip",
    "--log-max-attention-logit": "log_max_attention_logit",
}
"""Flags that only Transformer Engine's layers (or the kitchen extension's) look at: the others would ignore them."""


def _unsupported_layers(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    if args.transformer_impl != "local":
        yield f"--transformer-impl {args.transformer_impl}", "pass --transformer-impl local"
    if args.spec is not None and tuple(args.spec) != OWN_SPEC:
        yield f"--spec {' '.join(args.spec)}", "drop it, layers of other specifications are not known to the block"
    for flag, name in _NEED_TRANSFORMER_ENGINE.items():
        if getattr(args, name):
            yield flag, "drop it, it is for layers of Transformer Engine"
    for flag, given in {
        "--fp8-format": args.fp8,
        "--fp4-format": args.fp4,
        "--mtp-num-layers": args.mtp_num_layers,
        "--moe-latent-size": args.moe_latent_size,
        "--moe-enable-routing-replay": args.moe_enable_routing_replay,
        "--moe-expert-rank-capacity-factor": args.moe_expert_rank_capacity_factor is not None,
        "--moe-router-padding-for-quantization": args.moe_router_padding_for_quantization,
        "--moe-router-padding-for-fp8": args.moe_router_padding_for_fp8,
        "--moe-routing-trace-path": getattr(args, "moe_routing_trace_path", None),
        "--mlp-chunks-for-training": args.mlp_chunks_for_training > 1,
        "--heterogeneous-layers-config-path": args.heterogeneous_layers_config_path,
        "--heterogeneous-layers-config-encoded-json": args.heterogeneous_layers_config_encoded_json,
        "--experimental-attention-variant": args.experimental_attention_variant,
        "--batch-invariant-mode": args.batch_invariant_mode,
        "--init-model-with-meta-device": args.init_model_with_meta_device,
    }.items():
        if given:
            yield flag, "drop it"
    if args.moe_use_upcycling:
        yield "--moe-use-upcycling", "convert the checkpoint in a run of its own"


def _unsupported_memory_savers(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    others = sorted(set(args.recompute_modules or ()) - _RECOMPUTABLE)
    if args.recompute_granularity == "selective" and others:
        yield f"--recompute-modules {' '.join(others)}", f"choose among {', '.join(sorted(_RECOMPUTABLE))}"
    for flag, given in {
        "--distribute-saved-activations": args.distribute_saved_activations,
        "--cpu-offloading-num-layers": args.cpu_offloading_num_layers > 0,
        "--fine-grained-activation-offloading": args.fine_grained_activation_offloading,
        "--moe-paged-stash": args.moe_paged_stash,
        # Megatron's validation turns these two into the third, and deletes them.
        "--enable-cuda-graph": getattr(args, "enable_cuda_graph", False),
        "--external-cuda-graph": getattr(args, "external_cuda_graph", False),
        f"--cuda-graph-impl {args.cuda_graph_impl}": args.cuda_graph_impl != "none",
    }.items():
        if given:
            yield flag, "drop it"


def _unsupported_logs(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Megatron's hooks on layers keep the last call's tensors, and take it for the whole micro-batch."""
    for flag, interval in {
        "--save-activations-interval": args.save_activations_interval,
        "--save-dgrads-interval": args.save_dgrads_interval,
        "--save-tokens-per-expert-interval": args.save_tokens_per_expert_interval,
    }.items():
        if interval is not None:
            yield flag, "drop it, it would save one chunk for the whole micro-batch"
