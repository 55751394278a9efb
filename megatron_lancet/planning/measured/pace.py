"""Compares the speed of each rank in each traced step with the median times of the profile."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megatron_lancet.planning.measured.op_times import OpKey, StepOps
from megatron_lancet.planning.profile import StepPace
from megatron_lancet.schedule.ops import OpKind, Phase

MAX_PACES = 24
"""Every pace costs one more simulation when a step time is predicted, and some lines in the profile."""
MAX_RANKS = 8
"""The simulator groups the ranks of larger groups, as for the routing of single chunks."""
_DIGITS = 4

Place = tuple[Phase, int]
"""Phase, and global layer number (0 for ops outside the layers)."""


class RankPaces(NamedTuple):
    """Paces measured on one rank.

    Attributes:
        group: identifier of its expert-parallel group.
        place: its rank in the group.
        steps: factors by traced step.
    """

    group: int
    place: int
    steps: Sequence[Mapping[Place, float]]


def paces_of_rank(
    steps: Sequence[StepOps], op_ms: Mapping[OpKey, float], slowdown: Callable[[str], float]
) -> list[dict[Place, float]]:
    """Returns, for each step, the time of a layer's ops over their time in the profile.

    Experts don't count, because their time depends on the rows that they received.

    Args:
        op_ms: medians over all ranks.
        slowdown: factor by which messages in flight make ops of a kind slower.
    """
    found = []
    for step in steps:
        took_ms: defaultdict[Place, float] = defaultdict(float)
        usual_ms: defaultdict[Place, float] = defaultdict(float)
        for (layer, key), times in step.items():
            if key.kind not in (OpKind.OWN_EXPERTS, OpKind.EXPERTS):
                took_ms[key.phase, layer] += sum(sample.alone_ms(slowdown(key.kind)) for sample in times)
                usual_ms[key.phase, layer] += op_ms[key] * len(times)
        found.append({place: took_ms[place] / usual for place, usual in usual_ms.items() if usual > 0})
    return found


def typical_steps(plans: Sequence[str], ranks_ms: Sequence[Sequence[float]]) -> list[int]:
    """Returns the numbers of the steps that took the median time of their plan, one for each plan, in order.

    A step that other work disturbed is slow. Its pace would make every prediction slow.

    Args:
        plans: plan of each traced step.
        ranks_ms: time of each step on each rank; all ranks wait for the slowest one.
    """
    step_ms = [max(of_ranks) for of_ranks in zip(*ranks_ms, strict=True)]
    by_plan: defaultdict[str, list[int]] = defaultdict(list)
    for number, plan in enumerate(plans):
        by_plan[plan].append(number)
    return [sorted(numbers, key=step_ms.__getitem__)[(len(numbers) - 1) // 2] for numbers in by_plan.values()]


def step_paces(ranks: Sequence[RankPaces], ep_size: int, num_layers: int) -> tuple[StepPace, ...]:
    """Returns the paces of at most ``MAX_PACES`` steps, spread from the fastest to the slowest.

    A layer's pace is taken from the first group that has the layer. The result is empty in a mocked world, where only
    one of a group's ranks exists, for a single rank, and for a large group.
    """
    groups: defaultdict[int, dict[int, RankPaces]] = defaultdict(dict)
    for rank in ranks:
        groups[rank.group][rank.place] = rank
    whole = [by_place for _, by_place in sorted(groups.items()) if set(by_place) == set(range(ep_size))]
    if not whole or not 1 < ep_size <= MAX_RANKS:
        return ()
    paces = []
    for step in range(min(len(rank.steps) for rank in ranks)):
        forward, backward = (
            tuple(_layer_pace((phase, layer), step, whole) for layer in range(num_layers + 1))
            for phase in (Phase.FORWARD, Phase.INPUT_GRAD)
        )
        paces.append(StepPace(forward, backward))
    ordered = sorted(paces, key=_mean)
    if len(ordered) <= MAX_PACES:
        return tuple(ordered)
    return tuple(ordered[(2 * index + 1) * len(ordered) // (2 * MAX_PACES)] for index in range(MAX_PACES))


def _layer_pace(place: Place, step: int, groups: Sequence[Mapping[int, RankPaces]]) -> tuple[float, ...]:
    for by_place in groups:
        factors = [by_place[rank].steps[step].get(place) for rank in range(len(by_place))]
        known = [round(factor, _DIGITS) for factor in factors if factor is not None]
        if len(known) == len(factors):
            return tuple(known)
    return (1.0,) * len(groups[0])


def _mean(pace: StepPace) -> float:
    return statistics.fmean(factor for layers in (pace.forward, pace.backward) for ranks in layers for factor in ranks)
