"""Assigns deferred weight gradients to gaps: the best-fit greedy of Lancet section 4.1."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megatron_lancet.planning.simulation.lowering import COMPUTE, WAIT, Action, Step
from megatron_lancet.planning.simulation.played import Stage
from megatron_lancet.planning.simulation.rank_state import LayerDw
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.schedule.dw_queue import AT_ONCE
from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.schedule.plan import Gap, Plan

_MAX_OVERHANG = 2.0
"""A dW longer than this times the remaining gap is not added to dWs that are in the gap already."""


@dataclass
class _Ready:
    """A dW that may be placed into the gaps from number ``first`` to before number ``due``, when it must have run."""

    dw: LayerDw
    first: int
    due: int
    is_used: bool = False


@dataclass
class _OpenGap:
    """A backward all-to-all, the dWs placed into it, and the exposed time that they leave."""

    op: str
    remaining_ms: float
    taken: list[LayerDw] = field(default_factory=list)

    def take(self, one: _Ready) -> None:
        one.is_used = True
        self.taken.append(one.dw)
        self.remaining_ms -= one.dw.cost.ms


def best_fit_gaps(simulator: Simulator, plan: Plan) -> tuple[Gap, ...]:
    """Gaps for a plan that defers dWs.

    The length of a gap is the time for which compute waits for a backward all-to-all on the slowest rank if no dW runs
    at all; the other chunks' compute is hidden in it already. Gaps are visited in the order in which messages are
    waited for. Each takes the unused dW whose time is nearest to the remaining gap, the earliest of equals, until the
    gap is full or the nearest dW is longer than twice the remaining gap. Candidates are ready and within the plan's
    window. The runtime schedules unassigned dWs by its own rules, so the window and the memory bound still hold.

    Where the host can't see when a message arrives (CUDA), gaps get no other dWs. There every dW is placed: those that
    fit nowhere into the gap of their window with the most time left, however little, because a dW behind its last wait
    would hide nothing. Only what becomes ready after a stage's last all-to-all is in no gap.
    """
    return tuple(gap for stage in simulator.stages(plan) for gap in _gaps_of_stage(simulator, plan, stage))


def _gaps_of_stage(simulator: Simulator, plan: Plan, stage: Stage) -> Iterator[Gap]:
    column, exposed_ms = _exposed_without_dws(simulator, stage)
    dws: list[_Ready] = []
    gaps: list[_OpenGap] = []
    for code, layer, action in stage.backward:
        if code == COMPUTE:
            costs = action.weight_grads[column]
            due = len(gaps) + plan.dw_window
            dws += [_Ready(LayerDw(layer - cost.layers_back, cost), len(gaps), due) for cost in costs]
        elif code == WAIT:
            name = str(Op(layer, action.chunk, Phase.INPUT_GRAD, action.kind))
            gap = _OpenGap(name, exposed_ms.get(name, 0.0))
            _fill(gap, [one for one in dws if not one.is_used and one.due > len(gaps)])
            gaps.append(gap)
    if not simulator.costs.profile.link.host_polls:
        for one in dws:
            window = gaps[one.first : one.due]
            if window and not one.is_used:
                max(window, key=lambda gap: gap.remaining_ms).take(one)
    yield from (Gap(gap.op, tuple(dw.name for dw in gap.taken)) for gap in gaps if gap.taken)


def _fill(gap: _OpenGap, ready: list[_Ready]) -> None:
    while gap.remaining_ms > 0 and ready:
        best = min(ready, key=lambda one: abs(one.dw.cost.ms - gap.remaining_ms))
        if gap.taken and best.dw.cost.ms > _MAX_OVERHANG * gap.remaining_ms:
            break
        gap.take(best)
        ready.remove(best)


def _exposed_without_dws(simulator: Simulator, stage: Stage) -> tuple[int, dict[str, float]]:
    """The slowest rank's column, and how long it waits for each backward all-to-all, in ms."""
    without: dict[int, Action] = {}
    steps: list[Step] = []
    for code, layer, action in stage.backward:
        if action.weight_grads:
            key = id(action)  # the stage keeps its actions alive, so ids are unique
            if key not in without:
                without[key] = replace(action, weight_grads=((),) * len(action.weight_grads))
            action = without[key]
        steps.append((code, layer, action))
    result = simulator.play(steps, Phase.INPUT_GRAD, AT_ONCE, simulator.start_ms(), record=True)
    column = result.end_ms.index(max(result.end_ms))
    return column, {wait.name: wait.end_ms - wait.exposed_from_ms for wait in result.waits[column]}
