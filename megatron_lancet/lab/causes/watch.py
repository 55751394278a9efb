"""``--lancet-diagnose-interval``: traces one step in every N, and reports why ranks waited in it.

The traces are gathered when the step has ended, outside of what is timed: in each expert-parallel group to its first
rank, which finds the causes; these are small, and all ranks get them. All ranks trace the same steps.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lancet.lab.causes.attribution import StepCauses, merged
from megatron_lancet.lab.causes.changes import Changes
from megatron_lancet.lab.causes.step import causes_of_group, link_kind, traced_rank
from megatron_lancet.lab.causes.text import CausesOfStep, change_line
from megatron_lancet.lab.causes.traced import CannotReplay, TracedRank
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.observe.scalars import PREFIX, ScalarWriter, megatrons_writer
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.observe.step_stats import NUM_WARM_UP_STEPS
from megatron_lancet.training.observe.traced_steps import traced_step
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.process.console import say


class CauseWatch:
    """Traces a step in each interval under the run's final plan.

    Attributes:
        found: what was found, by step, on all ranks.
    """

    def __init__(
        self,
        setup: OverlapSetup,
        recorder: StepRecorder,
        device: torch.device,
        is_settled: Callable[[], bool],
        interval: int,
        is_report_due: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            is_settled: returns whether the run has its final plan; the same on all ranks.
            interval: steps from one traced step to the next.
            is_report_due: returns whether the next step is traced for the report.
        """
        self._setup = setup
        self._recorder = recorder
        self._device = device
        self._is_settled = is_settled
        self._interval = interval
        self._is_report_due = is_report_due
        self._changes = Changes()
        self._plan: Plan | None = None
        self.found: list[CausesOfStep] = []

    def observe(self, step: Callable[[], Any]) -> Any:
        """Run a training step, and find the causes of its waits if it is one to trace."""
        if not self._is_turn():
            return step()
        result, own = traced_step(self._setup, self._device, step)
        rank = traced_rank(own, self._device)
        self.note(gathered_causes(self._setup, self._device, self._recorder.iteration, rank))
        return result

    def _is_turn(self) -> bool:
        if self._setup.stages[0].decoder.comm.trace is not None or self._is_report_due() or not self._is_settled():
            return False
        if self._recorder.num_steps < NUM_WARM_UP_STEPS:
            return False
        return self._recorder.iteration % self._interval == 0

    def note(self, found: CausesOfStep) -> None:
        """Keeps, writes and says what was found in a step."""
        is_first = not self.found
        self.found.append(found)
        if self._plan != self._setup.plan:
            self._plan = self._setup.plan
            self._changes.restart()
        if found.causes is not None:
            write_cause_scalars(megatrons_writer(), found.step, found.causes)
            changes = self._changes.add(found.step, found.causes)
        else:
            changes = []
        if is_first:
            say(f"Megatron-Lancet {found.as_line()}")
        for change in changes:
            say(f"Megatron-Lancet {change_line(change)}")


def gathered_causes(setup: OverlapSetup, device: torch.device, step: int, own: TracedRank) -> CausesOfStep:
    """The causes of a step's waits, mean over expert-parallel groups; the same on all ranks. Collective over all.

    Args:
        step: its number.
        own: this rank's trace.
    """
    group = parallel_state.get_expert_model_parallel_group()
    is_first = dist.get_group_rank(group, dist.get_rank()) == 0
    ranks: list[Any] | None = [None] * group.size() if is_first else None
    dist.gather_object(own, ranks, dst=dist.get_global_rank(group, 0), group=group)
    of_group: StepCauses | str | None = None
    if ranks is not None:
        nodes = setup.stages[0].decoder.comm.nodes
        per_node = nodes.ranks_per_node if nodes is not None else None
        try:
            of_group = causes_of_group(ranks, link_kind(setup.stages[0].decoder.comm, device), per_node)
        except CannotReplay as error:
            of_group = str(error)
    of_groups: list[StepCauses | str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_groups, of_group)
    causes = [one for one in of_groups if isinstance(one, StepCauses)]
    if not causes:
        return CausesOfStep(step, why_not=next(one for one in of_groups if isinstance(one, str)))
    return CausesOfStep(step, merged(causes))


def write_cause_scalars(writer: ScalarWriter | None, iteration: int, causes: StepCauses) -> None:
    """Write the causes of a traced step's waits in ms, mean over ranks, under ``lancet/exposed_by_cause/``.

    Args:
        writer: Megatron's writers; None writes nothing.
        iteration: training step from 1, as in Megatron's scalars.
    """
    if writer is None:
        return
    for name, ms in causes.by_name().items():
        writer.add_scalar(f"{PREFIX}exposed_by_cause/{name}_ms", ms, iteration)
