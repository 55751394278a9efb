"""Orders the steps of backwards and of the forwards paired with them, as ``schedule/pairing.py`` says."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lancet.planning.simulation.lowering import Action, EndBackward, Step, at_place
from megatron_lancet.schedule.ops import Wait
from megatron_lancet.schedule.pairing import PairedTurns

_END = (EndBackward, 0, Action("", 0, (), ()))


class Passes(NamedTuple):
    """The steps of a micro-batch on one pipeline stage, forward and backward."""

    forward: Sequence[Step]
    backward: Sequence[Step]


def paired_steps(micro_batches: Sequence[Passes]) -> list[Step]:
    """Steps of the pairs of neighbouring micro-batches: each one's backward with the next one's forward paired with it.

    The first forward and the last backward have no partner and are left out. A pair's forward ends in its pair, so no
    message is in flight before the first pair and behind the last one. Between them the first dispatch of the next
    forward is, so the pairs are one list.
    """
    turns = [_turns(one.forward, number) for number, one in enumerate(micro_batches)]
    steps: list[Step] = []
    num_done = 0
    for number, one in enumerate(micro_batches[:-1]):
        beside = turns[number + 1]
        following = turns[number + 2] if number + 2 < len(turns) else None
        order = PairedTurns(len(beside) - 1, sum(verb is Wait for verb, _, _ in one.backward))
        num_done, carried = _take(steps, beside, num_done, order.done_by(0)), 0
        place = 0
        for verb, layer, action in one.backward:
            if verb is Wait:
                place += 1
                num_done = _take(steps, beside, num_done, order.done_by(place))
                if order.begins_next(place) and following is not None:
                    carried = _take(steps, following, 0, 1)
            steps.append((verb, at_place(layer, number, is_forward=False), action))
        _take(steps, beside, num_done, len(beside))  # a backward without waits leaves all but one
        steps.append(_END)
        num_done = carried
    return steps


def _turns(forward: Sequence[Step], micro_batch: int) -> list[list[Step]]:
    """A forward's steps, split in front of each wait."""
    turns: list[list[Step]] = [[]]
    for verb, layer, action in forward:
        if verb is Wait:
            turns.append([])
        turns[-1].append((verb, at_place(layer, micro_batch, is_forward=True), action))
    return turns


def _take(steps: list[Step], turns: Sequence[list[Step]], num_done: int, until: int) -> int:
    """Appends the turns that are not done yet up to ``until``; returns the number of turns that are done then."""
    for turn in turns[num_done:until]:
        steps += turn
    return max(num_done, until)
