"""Describes the plan that a run would get."""

import argparse
from pathlib import Path

from megatron_lancet.config import LancetConfig
from megatron_lancet.schedule.plan import DwPolicy, Plan
from megatron_lancet.training.plan.attention import uses_sdpa
from megatron_lancet.training.plan.comm_priority import choose_micro_ops
from megatron_lancet.training.plan.comm_sms import check_comm_sms
from megatron_lancet.training.plan.limits import planning_limits
from megatron_lancet.training.plan.select import choose_plan, is_tuned
from megatron_lancet.training.tuning.announcement import announced_plan, num_tuning_steps
from megatron_lancet.training.tuning.profile_to_file import check_can_profile


def plan_lines(args: argparse.Namespace, config: LancetConfig) -> list[str]:
    """Describes the plan, its source, and what automatic tuning would do, in lines for the user.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: what the run would refuse.
    """
    if isinstance(config.plan, Path) and not config.plan.is_file():
        return [f"from {config.plan}, which is not here: it is checked when the run starts"]
    plan, line = choose_plan(args, config)
    choose_micro_ops(args, config, plan)
    check_can_profile(args, config, plan)
    check_comm_sms(args, config, plan, device=None)
    if plan is None:
        return [line]
    lines = _tuning_lines(args, config, plan, line) if is_tuned(args, config) else [line]
    if plan.dw_policy is not DwPolicy.NONE and plan.dw_memory_bytes is None:
        lines.append(
            "deferred weight gradients need memory beyond the estimate above: --lancet-dw-memory-mb bounds it, "
            "--lancet-dw-policy none avoids it"
        )
    return lines


def _tuning_lines(args: argparse.Namespace, config: LancetConfig, plan: Plan, line: str) -> list[str]:
    limits, num_steps = planning_limits(args, config), num_tuning_steps(args, config)
    if args.train_iters is not None and args.train_iters < num_steps:
        return [f"{line} (fixed: {args.train_iters} steps are fewer than the {num_steps} that tuning takes)"]
    dims, ranges = " or ".join(limits.chunk_dims), ", ".join(limits.ranges)
    return [
        announced_plan(args, config, plan, line),
        "auto measures steps before and after the change, and keeps the plan only if it pays",
        f"it may cut along {dims}; ranges {ranges}; weight gradients {' or '.join(limits.dw_policies)}",
        *(f"not {exclusion.what}: {exclusion.reason}" for exclusion in limits.excluded),
    ]


def saves_scores(args: argparse.Namespace, config: LancetConfig) -> bool:
    """Whether core attention will keep its matrices of scores for the backward pass."""
    if args.transformer_impl == "local":
        return not uses_sdpa(args, config)
    return args.attention_backend.name in ("unfused", "local")
