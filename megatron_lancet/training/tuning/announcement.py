"""The line that announces a run's plan before the first step."""

import argparse

from megatron_lancet.config import LancetConfig
from megatron_lancet.profiler.measure import num_profile_steps
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.plan.limits import planning_limits
from megatron_lancet.training.plan.select import is_tuned
from megatron_lancet.training.tuning.controller import TuningController
from megatron_lancet.training.tuning.profile_steps import plans_within


def announced_plan(args: argparse.Namespace, config: LancetConfig, plan: Plan | None, line: str) -> str:
    """Describes the plan that :func:`~megatron_lancet.training.plan.select.choose_plan` returned with ``line``.

    Args:
        args: Megatron's arguments, validated.
        plan: None for stock modules.
    """
    if plan is None or not is_tuned(args, config):
        return line
    fewer = "" if config.cache_dir is None else " (fewer with a cached profile)"
    return f"auto (tuned during training); runs shorter than {num_tuning_steps(args, config)} steps{fewer} use {line}"


def num_tuning_steps(args: argparse.Namespace, config: LancetConfig) -> int:
    """Training steps until a tuned plan is verified, without a cached profile."""
    plans = plans_within(args, config, planning_limits(args, config))
    return TuningController(config.tune_steps).num_steps_to_plan(num_profile_steps(plans))
