"""Holds the timelines of one training step, the content of pages and traces."""

from dataclasses import dataclass

from megatron_lancet.report.compared import Compared
from megatron_lancet.schedule.timeline import RankTimeline


@dataclass(frozen=True)
class TimelineRecord:
    """One training step on several ranks.

    Attributes:
        title: description of the run in one line.
        measured: timeline of each rank, on its own clock; see :func:`megatron_lancet.lab.views.clocks.aligned`.
        predicted: predicted timelines of the same ranks or some of them; empty without a prediction.
        before: timelines measured under the previous plan; empty without one.
        ep_groups: ranks that exchange messages with each other; empty if all ranks do.
        reasons: reasons why messages stayed exposed, by op name.
        ranks_per_node: neighbours in such a group that are on a node; None if no plan of the run has two hops.
        about: model, ranks and date in one line; empty if unknown.
        step: number of the step; None if unknown.
        compared: steps without overlap and under the plan; None where none were measured without overlap.
    """

    title: str
    measured: tuple[RankTimeline, ...]
    predicted: tuple[RankTimeline, ...] = ()
    before: tuple[RankTimeline, ...] = ()
    ep_groups: tuple[tuple[int, ...], ...] = ()
    reasons: dict[str, str] | None = None
    ranks_per_node: int | None = None
    about: str = ""
    step: int | None = None
    compared: Compared | None = None
