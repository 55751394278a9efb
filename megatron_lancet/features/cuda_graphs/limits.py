"""What graphs of attention and routing do not work with, and Megatron's flags for graphs of its own."""

import argparse
from collections.abc import Iterator

from megatron_lancet.config import LancetConfig
from megatron_lancet.feature_parts import PlanPart
from megatron_lancet.training.plan.support import own_samples

_CAPTURED = {"attn", "moe_router", "moe_preprocess"}
"""Accepted values of ``--cuda-graph-modules``. Of ``moe_preprocess`` the permutation of rows still runs eagerly."""
_IMPLEMENTATIONS = ("local", "transformer_engine")
_RECOMPUTED = {"moe", "moe_act", "shared_experts", "mlp"}
"""Values of ``--recompute-modules`` outside of attention and norms."""
_BALANCING = {"none", "aux_loss", "seq_aux_loss"}


def megatrons_scopes(args: argparse.Namespace) -> list[str]:
    """The modules of which Megatron's flags ask for graphs; empty if none are asked for, or others than ours.

    Args:
        args: Megatron's arguments, not validated.
    """
    modules = args.cuda_graph_modules or getattr(args, "cuda_graph_scope_deprecated", None) or []
    names = [getattr(module, "name", module) for module in modules]
    is_ours = args.cuda_graph_impl in _IMPLEMENTATIONS and {"attn", "moe_router"} <= {*names} <= _CAPTURED
    return names if is_ours else []


def clear_megatrons_flags(args: argparse.Namespace) -> None:
    """Clears Megatron's flags for graphs."""
    args.cuda_graph_impl, args.cuda_graph_modules, args.cuda_graph_scope_deprecated = "none", [], None


def blockers(args: argparse.Namespace, config: LancetConfig) -> Iterator[str]:
    """Yields settings with which a block can't be captured, each with its reason.

    Args:
        args: Megatron's arguments, validated or not.
    """
    random = "random numbers of a graph are not stock's"
    if args.hidden_dropout or args.attention_dropout:
        yield f"--hidden-dropout {args.hidden_dropout:g} and --attention-dropout {args.attention_dropout:g} ({random})"
    if args.moe_input_jitter_eps or args.moe_router_force_load_balancing or args.moe_router_force_biased is not None:
        yield f"--moe-input-jitter-eps, --moe-router-force-load-balancing or --moe-router-force-biased ({random})"
    if args.fp8 or args.fp4:
        yield "--fp8-format or --fp4-format (scales of a graph are not tested)"
    for flag, size in {
        "--tensor-model-parallel-size": args.tensor_model_parallel_size,
        "--context-parallel-size": args.context_parallel_size,
    }.items():
        if size > 1:
            yield f"{flag} {size} (attention has collectives there)"
    if args.recompute_granularity == "full":
        yield "--recompute-granularity full (a graph keeps what it saves)"
    modules = {*(args.recompute_modules or ())} - _RECOMPUTED if args.recompute_granularity == "selective" else set()
    if args.recompute_granularity == "selective" and not args.recompute_modules:
        modules = {"core_attn"}  # Megatron's default
    if modules:
        yield f"--recompute-modules {' '.join(sorted(modules))} (a graph keeps what it saves)"
    balancing = args.moe_router_load_balancing_type
    others = {*([balancing] if isinstance(balancing, str) else balancing)} - _BALANCING
    if others:
        yield f"--moe-router-load-balancing-type {' '.join(sorted(others))} (it needs a collective, or the host)"
    yield from _inputs(args, config)
    for feature in config.features:
        for blocker in feature.plan_blockers(PlanPart.CUDA_GRAPHS, args, config):
            yield blocker.reason


def _inputs(args: argparse.Namespace, config: LancetConfig) -> Iterator[str]:
    """Yields settings by which attention or the router has inputs or results besides hidden states."""
    if args.reset_attention_mask or args.dataloader_inter_document_masking:
        yield "--reset-attention-mask or --dataloader-inter-document-masking (each micro-batch has another mask)"
    if own_samples(args, config) is not None:
        yield "samples of several sizes"
    if args.qk_clip or args.log_max_attention_logit:
        yield "--qk-clip or --log-max-attention-logit (attention keeps a result for the host)"
