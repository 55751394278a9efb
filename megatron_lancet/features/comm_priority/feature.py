"""``--lancet-comm-priority``: gradient reductions give way to the all-to-alls of the backward pass."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature, Feature, RunFacts
from megatron_lancet.feature_parts import PlanBlocker, PlanPart
from megatron_lancet.features.comm_priority.comm_scheduler import CommScheduler
from megatron_lancet.features.comm_priority.grad_reduction import missing_seams, reductions_in_micro_ops
from megatron_lancet.flags import CheckedFlags, flag, words
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.reductions import DEFAULT_CHUNK_MB, CommPriority, GradientReduction, MicroOps
from megatron_lancet.training.run import Run
from megatron_lancet.units import mb_to_bytes

FLAG = "--lancet-comm-priority"


@dataclass(frozen=True)
class CommPriorityFlags(CheckedFlags):
    """Order of all-to-alls and gradient reductions, and the cut of the latter."""

    comm_priority: CommPriority = flag(
        CommPriority.OFF,
        same_on_all_ranks=True,
        **words(CommPriority),
        help="all-to-all-first: cut gradient reductions into parts, which run only while no all-to-all of the backward "
        "pass is in flight; needs --overlap-grad-reduce. off (default): Megatron reduces each bucket "
        "as soon as it is complete.",
    )
    grad_chunk_mb: float = flag(
        DEFAULT_CHUNK_MB,
        same_on_all_ranks=True,
        parsed_as=float,
        above=0,
        unit="MB",
        metavar="MB",
        advice="To reduce whole buckets pass --lancet-comm-priority off.",
        help="with --lancet-comm-priority, size of a part, and most gradients between two all-to-alls, in 10^6 bytes "
        "(default: {default:g}).",
    )

    @property
    def chunk_bytes(self) -> int:
        """Most gradient bytes that one collective reduces."""
        return mb_to_bytes(self.grad_chunk_mb)


class Priority(Feature):
    """``--lancet-comm-priority``."""

    name = "comm_priority"
    flags = CommPriorityFlags

    def needs_plan(self, config: LancetConfig) -> bool:
        """Whether all-to-alls go first."""
        return config.of(CommPriorityFlags).comm_priority is not CommPriority.OFF

    def missing_seams(self) -> Iterator[str]:
        """Yields what the priority uses of DDP's reductions, and this Megatron lacks."""
        return missing_seams()

    def plan_blockers(self, part: PlanPart, args: argparse.Namespace, config: LancetConfig) -> Iterator[PlanBlocker]:
        """Pairs under virtual stages."""
        wanted = config.of(CommPriorityFlags).comm_priority
        if (
            part is PlanPart.PAIRING
            and wanted is not CommPriority.OFF
            and bool(args.virtual_pipeline_model_parallel_size)
        ):
            yield PlanBlocker(
                f"with virtual stages {FLAG} {wanted} would count the all-to-alls of the forward paired with a "
                "backward among the remaining all-to-alls of this backward",
                f"drop {FLAG}",
            )

    def reduction(self, config: LancetConfig, reduction: GradientReduction) -> GradientReduction:
        """Reductions in micro-ops, for the planner."""
        wanted = config.of(CommPriorityFlags)
        return replace(reduction, priority=wanted.comm_priority, chunk_bytes=wanted.chunk_bytes)

    def check(self, facts: RunFacts) -> None:
        """Refuses a priority that the run can't have."""
        choose_micro_ops(facts.args, facts.config, facts.plan)

    def start(self, run: Run) -> "ActivePriority | None":
        """Takes the run's gradient reductions over."""
        micro_ops = choose_micro_ops(run.facts.args, run.config, run.facts.plan)
        return None if micro_ops is None else ActivePriority(micro_ops, run.stats)


class ActivePriority(ActiveFeature):
    """The scheduler of a run's reductions.

    Args:
        micro_ops: cut of the reductions.
    """

    def __init__(self, micro_ops: MicroOps, stats: CommStats) -> None:
        self._scheduler = CommScheduler(micro_ops, stats)

    def enter(self, stack: ExitStack) -> None:
        """Lets DDP's gradient reductions go through the scheduler."""
        stack.enter_context(reductions_in_micro_ops(self._scheduler))

    def comm_settings(self) -> Mapping[str, Any]:
        """Makes all-to-alls notify the scheduler when reductions may be launched."""
        return {"scheduler": self._scheduler}

    def observe(self, step: Callable[[], Any]) -> Any:
        """Runs a training step, and asserts that all its reductions are done."""
        result = step()
        self._scheduler.end_step()
        return result

    def lines(self, report: Mapping[str, Any]) -> Sequence[str]:
        """The line on reductions, if there were any."""
        if not report["num_grad_micro_ops"]:
            return ()
        lines = [
            f"gradients          {report['grad_bytes'] / 1e6:.1f} MB reduced in {report['num_grad_micro_ops']:.0f} "
            f"parts, {report['num_grad_micro_ops_between']:.0f} between all-to-alls and the others after the last; "
            f"{report['grad_exposed_ms']:.1f} ms waited for"
        ]
        if not report["num_grad_micro_ops_between"]:
            lines.append(f"  this plan has no gaps between all-to-alls for them: {FLAG} off is faster")
        return lines


def choose_micro_ops(args: argparse.Namespace, config: LancetConfig, plan: Plan | None) -> MicroOps | None:
    """Chooses how gradient reductions are cut; None where Megatron runs them.

    Args:
        args: Megatron's arguments, validated.
        plan: None for stock modules.

    Raises:
        UsageError: another flag does not work with the priority.
    """
    wanted = config.of(CommPriorityFlags)
    if wanted.comm_priority is CommPriority.OFF:
        if wanted.grad_chunk_mb != DEFAULT_CHUNK_MB:
            raise UsageError(
                f"--lancet-grad-chunk-mb {wanted.grad_chunk_mb:g} cuts gradient reductions, but {FLAG} is off: none is "
                f"cut. Pass {FLAG} {CommPriority.ALL_TO_ALL_FIRST} too, or drop it."
            )
        return None
    given = f"{FLAG} {wanted.comm_priority}"
    if plan is None:
        raise UsageError(
            f"{given} needs the overlapping block, but this run has stock Megatron modules: it was given --lancet-plan "
            f"off or has no expert parallelism (--expert-model-parallel-size is {args.expert_model_parallel_size}). "
            "Drop one of the two."
        )
    if not args.overlap_grad_reduce:
        raise UsageError(
            f"{given} orders gradient reductions in the backward pass, but they run after it: pass "
            "--overlap-grad-reduce, or drop the flag."
        )
    num_instances = args.num_distributed_optimizer_instances
    for other, is_given in {
        "--ddp-reduce-scatter-with-fp32-accumulation": args.ddp_reduce_scatter_with_fp32_accumulation,
        f"--num-distributed-optimizer-instances {num_instances}": num_instances > 1,
    }.items():
        if is_given:
            raise UsageError(
                f"{other} does not work with {given}: it changes how gradients are reduced. Drop one of the two."
            )
    return MicroOps(wanted.chunk_bytes)


COMM_PRIORITY = Priority()
