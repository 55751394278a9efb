"""Traces two steps of a run for its report: one without overlap, one under the plan."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.runtime.trace import StepTrace, Trace
from megatron_lancet.schedule.plan import Plan, plan_without_overlap
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.observe.step_stats import NUM_WARM_UP_STEPS
from megatron_lancet.training.overlap_setup import OverlapSetup

MAX_RANKS = 16
"""Maximum number of lanes that are readable: a larger world shows only ranks of rank 0's expert-parallel group."""


def traced_step(setup: OverlapSetup, device: torch.device, step: Callable[[], Any]) -> tuple[Any, StepTrace]:
    """Runs a training step and traces it on this rank."""
    comm = setup.stages[0].decoder.comm
    trace = Trace(device, dist.get_rank())
    comm.record_to(trace)
    trace.begin_step()
    try:
        return step(), trace.end_step()
    finally:
        comm.record_to(None)


class TracedSteps:
    """Traces a step in the warm-up of a run that starts without overlap, and one under each final plan.

    A traced step is a little slower than others. Medians over the steps don't change with it.

    Attributes:
        last: the step under the newest final plan; None before it was traced.
        plan: that plan; None before.
        iteration: number of the newest traced step; 0 before.
    """

    def __init__(
        self, setup: OverlapSetup, recorder: StepRecorder, device: torch.device, is_settled: Callable[[], bool]
    ) -> None:
        """
        Args:
            is_settled: returns whether the run has its final plan; the same on all ranks.
        """
        self._setup = setup
        self._recorder = recorder
        self._device = device
        self._is_settled = is_settled
        self._before: StepTrace | None = None
        self.last: StepTrace | None = None
        self.plan: Plan | None = None
        self.iteration = 0

    def is_due(self) -> bool:
        """Whether the next step is to be traced as one under the final plan; others then don't trace it."""
        is_due = self._recorder.num_steps >= NUM_WARM_UP_STEPS and self._is_settled() and self.plan != self._setup.plan
        return is_due and all(feature.is_steady() for feature in self._recorder.features)

    def observe(self, step: Callable[[], Any]) -> Any:
        """Run a training step, and trace it if it is one for the report."""
        num_steps, plan = self._recorder.num_steps, self._setup.plan
        if self._is_settled():
            if not self.is_due():
                return step()
            result, self.last = traced_step(self._setup, self._device, step)
            self.plan, self.iteration = plan, self._recorder.iteration
            return result
        if self._before is None and num_steps == NUM_WARM_UP_STEPS - 1 and plan == plan_without_overlap():
            result, self._before = traced_step(self._setup, self._device, step)
            self.iteration = self._recorder.iteration
            return result
        return step()

    def gather(self, title: str) -> TimelineRecord | None:
        """The traced steps on rank 0; None on others, and where no step was traced. Collective over all ranks.

        Where the run ended before a step under a final plan, the step without overlap is the measured one.
        """
        first, last = (None, self._before) if self.last is None else (self._before, self.last)
        groups: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(groups, dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group()))
        shown = range(dist.get_world_size()) if dist.get_world_size() <= MAX_RANKS else groups[0][:MAX_RANKS]
        own = (first and first.timeline, last and last.timeline) if dist.get_rank() in shown else (None, None)
        everywhere: list[Any] = [(None, None)] * dist.get_world_size()
        dist.gather_object(own, everywhere if dist.get_rank() == 0 else None)
        # By rank: in a mocked world every entry is rank 0's.
        before = {timeline.rank: timeline for timeline, _ in everywhere if timeline is not None}
        now = {timeline.rank: timeline for _, timeline in everywhere if timeline is not None}
        if dist.get_rank() != 0 or not now:
            return None
        nodes = self._setup.stages[0].decoder.comm.nodes
        return TimelineRecord(
            title=title,
            measured=tuple(now.values()),
            before=tuple(before.values()),
            ep_groups=tuple(dict.fromkeys(tuple(group) for group in groups)),
            ranks_per_node=nodes.ranks_per_node if nodes is not None else None,
            step=self.iteration,
        )
