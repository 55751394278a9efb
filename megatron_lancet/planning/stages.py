"""Cuts the segments of a plan at pipeline stages, and counts the slots in which stages wait for each other."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.plan_file import layers_beyond
from megatron_lancet.schedule.plan import Plan, Segment


def split_at_stages(plan: Plan, stage_of_layer: Sequence[int]) -> Plan:
    """The plan with segments cut at pipeline stages, across which nothing overlaps.

    Raises:
        RecordError: the plan is for another number of layers.
    """
    problem = layers_beyond(plan, len(stage_of_layer))
    if problem:
        raise RecordError(f"the plan does not fit a model of {len(stage_of_layer)} layers: {problem}")
    segments = _split(plan.segments, stage_of_layer)
    if plan.pairing is None:
        return dataclasses.replace(plan, segments=segments)
    ends = dataclasses.replace(plan.pairing, end_segments=_split(plan.pairing.end_segments, stage_of_layer))
    return dataclasses.replace(plan, segments=segments, pairing=ends)


def _split(segments_before: Sequence[Segment], stage_of_layer: Sequence[int]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for segment in segments_before:
        first, last = segment.first_layer, segment.last_layer or len(stage_of_layer)
        for number in range(first, last + 1):
            is_end = number == last or stage_of_layer[number] != stage_of_layer[number - 1]
            if is_end:
                end = segment.last_layer if number == last else number
                segments.append(dataclasses.replace(segment, first_layer=first, last_layer=end))
                first = number + 1
    return tuple(segments)


def slots_of_bubble(stage_of_layer: Sequence[int]) -> float:
    """Slots for which a step waits for other stages: (p - 1) / v with p stages of v virtual ones.

    Args:
        stage_of_layer: of each layer, in order: a stage has as many virtual ones as it has runs of layers.
    """
    num_virtual = Counter(stage for stage, _ in groupby(stage_of_layer))
    return max(stage_of_layer) / max(num_virtual.values())
