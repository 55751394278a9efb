"""Which plan a run gets, and which configurations the overlapping block refuses."""

import argparse
from collections.abc import Iterator

from megatron_lancet.config import LancetConfig, PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.schedule.plan import DwPolicy, Plan, fixed_plan

_NEEDS_WHOLE_MICRO_BATCH = "it decides over the whole micro-batch; pass --lancet-num-chunks 1"
_DRAWS_PER_CALL = "it draws random numbers per call, so chunks would change the run; pass --lancet-num-chunks 1"
_OWN_OVERLAP = "it is another way to hide the same communication; drop it"


def choose_plan(args: argparse.Namespace, config: LancetConfig) -> tuple[Plan | None, str]:
    """The plan of a run, or None for stock modules, and one line that says which and why.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: the run asks for overlap together with something that it does not support.
    """
    if config.plan is PlanChoice.OFF:
        return None, "off: stock Megatron modules"
    if not args.num_experts or args.expert_model_parallel_size == 1:
        if config.num_chunks not in (None, 1):
            raise UsageError(
                f"--lancet-num-chunks {config.num_chunks} overlaps the all-to-all of expert parallelism, but there "
                f"is none: --expert-model-parallel-size is {args.expert_model_parallel_size}. Drop the flag."
            )
        return None, "nothing to overlap without expert parallelism: stock Megatron modules"
    num_samples = args.micro_batch_size
    if config.num_chunks is not None and config.num_chunks > num_samples:
        raise UsageError(
            f"--lancet-num-chunks {config.num_chunks} is more than the micro-batch has samples: --micro-batch-size "
            f"is {num_samples}. Use at most {num_samples} chunks or a larger micro-batch."
        )
    plan = fixed_plan(num_samples, config.num_chunks, config.dw_policy, config.chunk_dim, _dw_memory_bytes(config))
    for flag, advice in _unsupported(args, plan):
        raise UsageError(f"{flag} does not work with the overlapping block yet: {advice}, or --lancet-plan off.")
    note = ""
    if plan.num_chunks > 1 and (args.hidden_dropout > 0 or args.attention_dropout > 0):
        note = "; dropout draws its random numbers chunk by chunk, so losses differ from stock's by chance"
    return plan, f"{plan}{note}"


def _dw_memory_bytes(config: LancetConfig) -> int | None:
    if config.dw_memory_mb is None:
        return None
    if config.dw_policy is DwPolicy.NONE:
        raise UsageError(
            f"--lancet-dw-memory-mb {config.dw_memory_mb:g} bounds deferred weight gradients, but --lancet-dw-policy "
            "none defers none. Drop one of the two."
        )
    return max(1, round(config.dw_memory_mb * 1e6))


def _unsupported(args: argparse.Namespace, plan: Plan) -> Iterator[tuple[str, str]]:
    """What the run asks for that the overlapping block lacks: (flag, what to do about it)."""
    yield from _unsupported_parallelism(args)
    yield from _unsupported_layers(args)
    yield from _unsupported_memory_savers(args)
    if plan.num_chunks > 1:
        yield from _unsupported_in_chunks(args)


def _unsupported_parallelism(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    sizes = {
        "--tensor-model-parallel-size": args.tensor_model_parallel_size,
        "--context-parallel-size": args.context_parallel_size,
        "--expert-tensor-parallel-size": args.expert_tensor_parallel_size,
        "--tensor-parallel-num-weight-shards": args.gtp_weight_remat_size,
    }
    for flag, size in sizes.items():
        if (size or 1) > 1:
            yield f"{flag} {size}", "use expert, data and pipeline parallelism"
    dispatcher = args.moe_token_dispatcher_type
    if dispatcher != "alltoall":
        yield (
            f"--moe-token-dispatcher-type {dispatcher}",
            "pass --moe-token-dispatcher-type alltoall",
        )
    for flag, given in {
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
    }.items():
        if given:
            yield flag, "use --use-distributed-optimizer"
    for flag, given in {
        "--overlap-moe-expert-parallel-comm": args.overlap_moe_expert_parallel_comm,
        "--delay-wgrad-compute": args.delay_wgrad_compute,
        "--overlap-dispatch-backward-with-experts-wgrad": args.overlap_dispatch_backward_with_experts_wgrad,
        "--moe-shared-expert-overlap": args.moe_shared_expert_overlap,
    }.items():
        if given:
            yield flag, _OWN_OVERLAP


def _unsupported_layers(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    if args.transformer_impl != "local":
        yield f"--transformer-impl {args.transformer_impl}", "pass --transformer-impl local"
    for flag, given in {
        "--fp8-format": args.fp8,
        "--fp4-format": args.fp4,
        "--mtp-num-layers": args.mtp_num_layers,
        "--moe-latent-size": args.moe_latent_size,
        "--moe-permute-fusion": args.moe_permute_fusion,
        "--moe-expert-capacity-factor": args.moe_expert_capacity_factor is not None,
        "--moe-pad-expert-input-to-capacity": args.moe_pad_expert_input_to_capacity,
        "--moe-expert-rank-capacity-factor": args.moe_expert_rank_capacity_factor is not None,
        "--moe-router-padding-for-quantization": args.moe_router_padding_for_quantization,
        "--moe-routing-trace-path": getattr(args, "moe_routing_trace_path", None),
        "--mlp-chunks-for-training": args.mlp_chunks_for_training > 1,
        "--heterogeneous-layers-config-path": args.heterogeneous_layers_config_path,
        "--experimental-attention-variant": args.experimental_attention_variant,
    }.items():
        if given:
            yield flag, "drop it"


def _unsupported_memory_savers(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    if args.recompute_granularity == "full":
        yield "--recompute-granularity full", "use --recompute-granularity selective --recompute-modules core_attn"
    others = sorted(set(args.recompute_modules or ()) - {"core_attn"})
    if args.recompute_granularity == "selective" and others:
        yield f"--recompute-modules {' '.join(others)}", "keep core_attn only"
    for flag, given in {
        "--cpu-offloading-num-layers": args.cpu_offloading_num_layers > 0,
        "--fine-grained-activation-offloading": args.fine_grained_activation_offloading,
        "--moe-paged-stash": args.moe_paged_stash,
        "--cuda-graph-impl": args.cuda_graph_impl != "none",
    }.items():
        if given:
            yield flag, "drop it"


def _unsupported_in_chunks(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    balancing = args.moe_router_load_balancing_type
    for kind in ("sinkhorn", "quantile_balancing"):
        if kind == balancing or kind in (balancing if isinstance(balancing, list) else ()):
            yield f"--moe-router-load-balancing-type {kind}", _NEEDS_WHOLE_MICRO_BATCH
    for flag, given in {
        "--moe-input-jitter-eps": args.moe_input_jitter_eps is not None,
        "--moe-router-force-load-balancing": args.moe_router_force_load_balancing,
        "--moe-router-force-biased": args.moe_router_force_biased is not None,
        "--moe-enable-routing-replay": args.moe_enable_routing_replay,
    }.items():
        if given:
            yield flag, _DRAWS_PER_CALL
