"""The timelines of one training step: what pages and traces are made of."""

from dataclasses import dataclass

from megatron_lancet.schedule.timeline import RankTimeline


@dataclass(frozen=True)
class TimelineRecord:
    """One training step on several ranks.

    Attributes:
        title: what was run, in a line.
        measured: of each rank, on its own clock. See :func:`megatron_lancet.report.timeline.clocks.aligned`.
        predicted: of the same ranks or some of them; empty if nothing was predicted.
        before: measured under the plan that the run is compared with; empty if there was none.
        ep_groups: ranks that exchange messages with each other; empty where all ranks do.
        reasons: why a message stayed exposed, by its name.
    """

    title: str
    measured: tuple[RankTimeline, ...]
    predicted: tuple[RankTimeline, ...] = ()
    before: tuple[RankTimeline, ...] = ()
    ep_groups: tuple[tuple[int, ...], ...] = ()
    reasons: dict[str, str] | None = None
