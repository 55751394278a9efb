"""The cost of messages from their sizes and durations.

The duration of an all-to-all has the wait for ranks that launch it later in it. The rank that launched it last waited
for none, so with the traces of all ranks the shortest duration of a message is its cost. With one trace that is not
known, and the lower quartile of the messages of about one size stands for it.
"""

import statistics
from collections.abc import Mapping, Sequence

from megatron_lancet.lab.from_trace.events import RankEvents
from megatron_lancet.lab.from_trace.lacks import TraceLacks
from megatron_lancet.lab.from_trace.step import TracedStep, expert_group
from megatron_lancet.planning.link_times import LinkTimes
from megatron_lancet.planning.measured.fit import TOLERANCE, fit

RankSteps = Mapping[int, Sequence[TracedStep]]
"""Steps of each rank, in order."""


def link_times(ranks: Mapping[int, RankEvents], steps: RankSteps, slowdown: float) -> LinkTimes:
    """Returns the message times of a run.

    Args:
        ranks: one trace of each recorded rank.
        slowdown: factor by which a message slows down concurrent compute, which a stock run does not show.

    Raises:
        TraceLacks: the traces of a group's ranks are not of the same steps.
    """
    groups = {expert_group(events) for events in ranks.values()}
    points: list[tuple[int, float]] = []
    counts_ms: list[float] = []
    for group in sorted(groups):
        members = [rank for rank in group if rank in steps]
        _check_alike(ranks, steps, members)
        is_alone = len(members) < len(group)
        own: list[tuple[int, float]] = []
        for of_step in zip(*(steps[rank] for rank in members), strict=True):
            for sent in zip(*(one.sent for one in of_step), strict=True):
                busiest = max(one.busiest_bytes(group.index(rank)) for rank, one in zip(members, sent, strict=True))
                own.append((busiest, min(one.ms for one in sent)))
            counts_ms += [min(times) for times in zip(*(one.counts_ms for one in of_step), strict=True)]
        points += _lower_quartiles(own) if is_alone else own
    is_cuda = any(events.device is not None for events in ranks.values())
    return LinkTimes(
        all_to_all=tuple((num_bytes, round(ms, 5)) for num_bytes, ms in fit(points)),
        counts_ms=round(statistics.median(counts_ms), 5),
        sends_share_link=not is_cuda,
        compute_slowdown=slowdown,
        host_polls=not is_cuda,
    )


def _check_alike(ranks: Mapping[int, RankEvents], steps: RankSteps, members: Sequence[int]) -> None:
    numbers = {rank: [len(step.sent) for step in steps[rank]] for rank in members}
    first = members[0]
    for rank in members:
        if numbers[rank] != numbers[first]:
            raise TraceLacks(
                ranks[rank].path,
                f"{len(numbers[rank])} steps of {numbers[rank][:3]} all-to-alls, where rank {first} has "
                f"{len(numbers[first])} of {numbers[first][:3]}",
                "Record the same steps on all ranks of an expert-parallel group (--profile-ranks)",
            )


def _lower_quartiles(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """One point for the messages of about one size."""
    groups: list[list[tuple[int, float]]] = []
    for num_bytes, ms in sorted(points):
        if not groups or num_bytes > groups[-1][0][0] * (1 + TOLERANCE):
            groups.append([])
        groups[-1].append((num_bytes, ms))
    return [(group[-1][0], sorted(ms for _, ms in group)[len(group) // 4]) for group in groups]
