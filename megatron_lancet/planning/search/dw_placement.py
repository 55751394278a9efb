"""Assigns deferred weight gradients to gaps: the best-fit greedy of Lancet section 4.1."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from megatron_lancet.planning.simulation.lowering import BESIDE, Action, EndBackward, Step, layer_at
from megatron_lancet.planning.simulation.pairs import Passes, paired_steps
from megatron_lancet.planning.simulation.played import Stage
from megatron_lancet.planning.simulation.rank_state import LayerDw
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.schedule.dw_queue import AT_ONCE
from megatron_lancet.schedule.ops import Compute, Op, Phase, Wait
from megatron_lancet.schedule.plan import Gap, Plan

_MIDDLE_PAIR = 1
"""Index of the pair, of three, whose waits are filled."""
_MAX_OVERHANG = 2.0
"""A dW longer than this times the remaining gap is not added to dWs that are in the gap already."""


@dataclass
class _Ready:
    """A dW that may be placed into the gaps from number ``first`` on, until ``due`` backward messages have arrived."""

    dw: LayerDw
    first: int
    due: int
    is_used: bool = False


@dataclass
class _OpenGap:
    """A wait, the dWs placed into it, and the exposed time that they leave.

    Attributes:
        num_passed: number of backward messages that have arrived before.
    """

    op: str
    num_passed: int
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
    return tuple(
        gap for stage in simulator.stages(plan) for gap in _gaps_of_stage(simulator, plan, stage, plan.is_paired)
    )


def planned_gaps(simulator: Simulator, plan: Plan) -> Plan:
    """The plan with gaps; if it is paired, with the gaps of a pair and of a lone backward at the ends."""
    gaps = best_fit_gaps(simulator, plan)
    if plan.pairing is None:
        return replace(plan, gaps=gaps)
    end_gaps = best_fit_gaps(simulator, plan.at_ends)
    return replace(plan, gaps=gaps, pairing=replace(plan.pairing, end_gaps=end_gaps))


def _gaps_of_stage(simulator: Simulator, plan: Plan, stage: Stage, is_paired: bool) -> Iterator[Gap]:
    steps = _pair_steps(stage) if is_paired else stage.backward
    column, exposed_ms = _exposed_without_dws(simulator, steps, is_paired)
    dws: list[_Ready] = []
    gaps: list[_OpenGap] = []
    num_passed = 0
    for verb, place, action in _middle_pair(steps) if is_paired else steps:
        is_forward = bool(place & BESIDE)
        if verb is Compute and not is_forward:
            costs = action.weight_grads[column]
            due = num_passed + plan.dw_window
            dws += [_Ready(LayerDw(layer_at(place) - cost.layers_back, cost), len(gaps), due) for cost in costs]
        elif verb is Wait:
            phase = Phase.FORWARD if is_forward else Phase.INPUT_GRAD
            name = str(Op(layer_at(place), action.chunk, phase, action.kind, action.tile))
            gap = _OpenGap(name, num_passed, exposed_ms.get(name, 0.0))
            _fill(gap, [one for one in dws if not one.is_used and one.due > num_passed])
            gaps.append(gap)
            num_passed += not is_forward
    if not simulator.costs.profile.link.host_polls:
        for one in dws:
            window = [gap for gap in gaps[one.first :] if gap.num_passed < one.due]
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


def _pair_steps(stage: Stage) -> list[Step]:
    """Three pairs of the stage."""
    return paired_steps([Passes(stage.forward, stage.backward)] * (_MIDDLE_PAIR + 3))


def _middle_pair(steps: Sequence[Step]) -> Sequence[Step]:
    ends = [index for index, (verb, _, _) in enumerate(steps) if verb is EndBackward]
    return steps[ends[_MIDDLE_PAIR - 1] + 1 : ends[_MIDDLE_PAIR]]


def _exposed_without_dws(
    simulator: Simulator, all_steps: Sequence[Step], is_paired: bool
) -> tuple[int, dict[str, float]]:
    """The slowest rank's column, and how long it waits for each message of the backward or of a pair, in ms."""
    without: dict[int, Action] = {}
    steps: list[Step] = []
    for verb, place, action in all_steps:
        if action.weight_grads:
            key = id(action)  # the stage keeps its actions alive, so ids are unique
            if key not in without:
                without[key] = replace(action, weight_grads=((),) * len(action.weight_grads))
            action = without[key]
        steps.append((verb, place, action))
    result = simulator.play(
        steps,
        Phase.INPUT_GRAD,
        AT_ONCE,
        simulator.start_ms(),
        record=True,
        later_rules=[AT_ONCE] * 2,
        is_paired=is_paired,
    )
    column = result.end_ms.index(max(result.end_ms))
    waits = result.waits[column]
    if is_paired:
        start_ms, end_ms = (result.marks[column][index].end_ms for index in (_MIDDLE_PAIR - 1, _MIDDLE_PAIR))
        waits = tuple(wait for wait in waits if start_ms <= wait.start_ms < end_ms)
    return column, {wait.name: wait.end_ms - wait.exposed_from_ms for wait in waits}
