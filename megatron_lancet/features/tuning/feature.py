"""Tuning in a run: ``--lancet-plan auto`` finds the plan while it trains; ``--lancet-profile`` writes a profile."""

import argparse

from megatron_lancet.config import LancetConfig, PlanChoice
from megatron_lancet.feature import Feature, RunFacts, Steering
from megatron_lancet.feature_parts import SmallLaunch
from megatron_lancet.features.tuning.autotune import AutoTune
from megatron_lancet.features.tuning.controller import TuningController
from megatron_lancet.features.tuning.flags import TuningFlags
from megatron_lancet.features.tuning.plan_maker import ProfilingPlanMaker
from megatron_lancet.features.tuning.profile_steps import num_steps_left, plans_within
from megatron_lancet.features.tuning.profile_to_file import ProfileToFile, check_can_profile
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.profiler.measure import MIN_TOKENS_OF_CHUNK, num_profile_steps
from megatron_lancet.schedule.plan import DwPolicy, Plan
from megatron_lancet.training.plan.limits import chunked_dim, planning_limits
from megatron_lancet.training.plan.support import micro_batch_shape
from megatron_lancet.training.run import OverlappedRun


class TuningFeature(Feature):
    """``--lancet-plan auto``."""

    name = "tuning"
    flags = TuningFlags

    def check(self, facts: RunFacts) -> None:
        """Refuses a profile where the run can't write one."""
        check_can_profile(facts.args, facts.config, facts.plan)

    def needs_plan(self, config: LancetConfig) -> bool:
        """A profile is of the overlapping block."""
        return config.of(TuningFlags).profile is not None

    def changes_plan(self, args: argparse.Namespace, config: LancetConfig) -> bool:
        """Whether the run finds its plan, or runs several for a profile."""
        return config.of(TuningFlags).profile is not None or is_tuned(args, config)

    def announced(self, facts: RunFacts, line: str) -> tuple[str, Limits | None]:
        """Says when the plan is found."""
        args, config = facts.args, facts.config
        if not is_tuned(args, config):
            return line, None
        num_steps = num_tuning_steps(args, config)
        if facts.is_dry_run and args.train_iters is not None and (num := num_steps_left(args)) < num_steps:
            return f"{line} (fixed: {num} steps are fewer than the {num_steps} that tuning takes)", None
        fewer = "" if config.of(TuningFlags).cache_dir is None else " (fewer with a cached profile)"
        line = f"auto (tuned during training); runs shorter than {num_steps} steps{fewer} use {line}"
        return line, planning_limits(args, config)

    def note(self, facts: RunFacts) -> str:
        """Says that a fixed plan has chunks that are too small to be worth it."""
        if facts.plan is None or facts.plan_changes:
            return ""
        most = max(segment.num_chunks for segment in facts.plan.segments)
        samples, positions = micro_batch_shape(facts.args, facts.config)
        num_tokens = samples * positions // facts.args.context_parallel_size // most
        if most == 1 or num_tokens >= MIN_TOKENS_OF_CHUNK:
            return ""
        return (
            f"; a chunk has {num_tokens} tokens, and with fewer than {MIN_TOKENS_OF_CHUNK} launching an op costs more "
            "than its work: cut into fewer chunks"
        )

    def shrink(self, launch: SmallLaunch) -> None:
        """Keeps a check away from the user's profiles."""
        launch.flags += ["--lancet-cache", "off"]

    def steer(self, run: OverlappedRun, plan: Plan) -> Steering | None:
        """Tunes the run, or profiles its first steps."""
        args, config = run.facts.args, run.config
        if config.of(TuningFlags).profile is not None:
            return ProfileToFile(args, config, run.setup, run.device)
        if not is_tuned(args, config):
            return None
        controller = TuningController(config.of(TuningFlags).tune_steps)
        run.recorder.keep(controller.num_tune_steps)
        maker = ProfilingPlanMaker(args, config, run.setup, run.device, controller.note)
        return AutoTune(args, controller, run.setup, run.recorder, maker, plan, run.device)


def is_tuned(args: argparse.Namespace, config: LancetConfig) -> bool:
    """Whether a run that overlaps tunes its plan; otherwise the plan of :func:`choose_plan` runs from the start.

    A run is not tuned if the user sets the number of chunks, if it ends after a profile, or if there is nothing to
    choose: micro-batches can neither be cut nor paired, rows have no tiles, every dW runs at once, and one kind of
    dispatch is allowed.

    Raises:
        UsageError: the run does not allow what the user asks for.
    """
    if (
        config.plan is not PlanChoice.AUTO
        or config.num_chunks is not None
        or config.of(TuningFlags).profile is not None
    ):
        return False
    limits = planning_limits(args, config)
    can_be_cut = any(chunked_dim(args, config, dim).most_chunks > 1 for dim in limits.chunk_dims)
    may_tile = limits.tiles is None or any(limits.tiles)
    has_choice = can_be_cut or may_tile or True in limits.pairing or len(limits.dispatches) > 1
    return has_choice or limits.dw_policies != (DwPolicy.NONE,)


def num_tuning_steps(args: argparse.Namespace, config: LancetConfig) -> int:
    """Training steps until a tuned plan is verified, without a cached profile."""
    plans = plans_within(args, config, planning_limits(args, config))
    return TuningController(config.of(TuningFlags).tune_steps).num_steps_to_plan(num_profile_steps(plans))


TUNING = TuningFeature()
