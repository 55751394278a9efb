"""Assigns deferred weight gradients to gaps: the best-fit greedy of Lancet section 4.1."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_lancet.planning.simulation.engine import LayerDw
from megatron_lancet.planning.simulation.lowering import COMPUTE, WAIT, Action, Step
from megatron_lancet.planning.simulation.simulator import Simulator, Stage
from megatron_lancet.schedule.dw_queue import AT_ONCE
from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.schedule.plan import Gap, Plan

_MAX_OVERHANG = 2.0
"""A dW longer than this times the remaining gap is not added to dWs that are in the gap already."""


@dataclass
class _Ready:
    """A dW that may still be placed; it has run in any case when ``due`` all-to-alls have finished."""

    dw: LayerDw
    due: int
    is_used: bool = False


def best_fit_gaps(simulator: Simulator, plan: Plan) -> tuple[Gap, ...]:
    """Gaps for a plan that defers dWs.

    The length of a gap is the time for which compute waits for a backward all-to-all on the slowest rank if no dW runs
    at all; the other chunks' compute is hidden in it already. Gaps are visited in the order in which messages are
    waited for. Each takes the unused dW whose time is nearest to the remaining gap, the earliest of equals, until the
    gap is full or the nearest dW is longer than twice the remaining gap. Candidates are ready and within the plan's
    window. The runtime schedules unassigned dWs by its own rules, so the window and the memory bound still hold.
    """
    return tuple(gap for stage in simulator.stages(plan) for gap in _gaps_of_stage(simulator, plan, stage))


def _gaps_of_stage(simulator: Simulator, plan: Plan, stage: Stage) -> Iterator[Gap]:
    column, exposed_ms = _exposed_without_dws(simulator, stage)
    ready: list[_Ready] = []
    num_passed = 0
    for code, layer, action in stage.backward:
        if code == COMPUTE:
            due = num_passed + plan.dw_window
            costs = action.weight_grads[column]
            ready += [_Ready(LayerDw(layer - cost.layers_back, cost), due) for cost in costs]
        elif code == WAIT:
            name = str(Op(layer, action.chunk, Phase.INPUT_GRAD, action.kind))
            ready = [one for one in ready if not one.is_used and one.due > num_passed]
            taken = _fill(ready, exposed_ms.get(name, 0.0))
            if taken:
                yield Gap(name, tuple(dw.name for dw in taken))
            num_passed += 1


def _fill(ready: list[_Ready], remaining_ms: float) -> list[LayerDw]:
    taken: list[LayerDw] = []
    while remaining_ms > 0:
        unused = [one for one in ready if not one.is_used]
        if not unused:
            break
        left_ms = remaining_ms
        best = min(unused, key=lambda one: abs(one.dw.cost.ms - left_ms))
        if taken and best.dw.cost.ms > _MAX_OVERHANG * remaining_ms:
            break
        best.is_used = True
        taken.append(best.dw)
        remaining_ms -= best.dw.cost.ms
    return taken


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
