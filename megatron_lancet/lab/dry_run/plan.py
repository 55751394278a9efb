"""Describes the plan that a run would get."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_lancet.config import LancetConfig
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.schedule.plan import DwPolicy, Plan
from megatron_lancet.training.plan.attention import uses_sdpa
from megatron_lancet.training.plan.select import choose_plan
from megatron_lancet.training.run import announced, check_features, facts_of_run, notes_of_features


@dataclass(frozen=True)
class DescribedPlan:
    """The plan that a run would get.

    Attributes:
        lines: the plan, its source, and what automatic tuning would do, for the user.
        is_stock: whether Megatron's own modules run.
        plan: the fixed plan; None for stock modules, or where it is not known.
        limits: what tuning may choose; None where the plan is fixed.
    """

    lines: list[str]
    is_stock: bool = False
    plan: Plan | None = None
    limits: Limits | None = None


def describe_plan(args: argparse.Namespace, config: LancetConfig) -> DescribedPlan:
    """Chooses the plan as the run would, and describes it.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: what the run would refuse.
    """
    if isinstance(config.plan, Path) and not config.plan.is_file():
        return DescribedPlan([f"from {config.plan}, which is not here: it is checked when the run starts"])
    plan, line = choose_plan(args, config)
    facts = facts_of_run(args, config, plan, device=None)
    check_features(facts)
    if plan is None:
        return DescribedPlan([line], is_stock=True)
    line, limits = announced(facts, line)
    lines = [line]
    if limits is not None:
        lines += _choice_lines(limits, config)
        lines += [note for feature in config.features for note in feature.choice_notes(args, config)]
    lines[0] += f"{notes_of_features(facts)}"
    lines += [line for feature in config.features for line in feature.missing_files(config)]
    if plan.dw_policy is not DwPolicy.NONE and plan.dw_memory_bytes is None:
        lines.append(
            "deferred weight gradients need memory beyond the estimate above: --lancet-dw-memory-mb bounds it, "
            "--lancet-dw-policy none avoids it"
        )
    return DescribedPlan(lines, plan=plan, limits=limits)


def _choice_lines(limits: Limits, config: LancetConfig) -> Iterator[str]:
    yield "auto measures steps before and after the change, and keeps the plan only if it pays"
    dims, ranges = " or ".join(limits.chunk_dims), ", ".join(limits.ranges)
    of_features = "".join(f"; {text}" for feature in config.features if (text := feature.choices(limits)))
    yield (
        f"it may cut along {dims}; ranges {ranges}; weight gradients {' or '.join(limits.dw_policies)}; "
        f"dispatch {' or '.join(map(str, limits.dispatches))}{of_features}"
    )
    for exclusion in limits.excluded:
        if not exclusion.is_evident:
            yield f"not {exclusion.what}: {exclusion.reason}"


def saves_scores(args: argparse.Namespace, config: LancetConfig) -> bool:
    """Whether core attention will keep its matrices of scores for the backward pass."""
    if args.transformer_impl == "local":
        return not uses_sdpa(args, config)
    return args.attention_backend.name in ("unfused", "local")
