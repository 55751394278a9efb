"""A traced step of the ranks of an expert-parallel group, from which causes of waits are found."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_lancet.schedule.ops import Op, OpKind
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

Key = tuple[str, int]
"""A name and its occurrence in the step, from 0: with several micro-batches each message has several."""


@dataclass(frozen=True)
class TracedRank:
    """One rank's record of a step.

    Attributes:
        timeline: on the group's common clock.
        start_ms: start of the step on that clock.
        received_rows: rows that the experts received in each micro-batch, by name of the forward's op.
        bytes_to: bytes of each message of a name to each rank that it connects; see ``runtime/trace.py``.
        blocked: parts of the step as (start_ms, end_ms, ms): for how much of each the thread that computes was blocked.
        follows_host: whether time between ops is the host's: on CUDA the device has nothing to run in it.
    """

    timeline: RankTimeline
    start_ms: float = 0.0
    received_rows: Mapping[str, tuple[int, ...]] | None = None
    bytes_to: Mapping[str, tuple[tuple[int, ...], ...]] | None = None
    blocked: tuple[tuple[float, float, float], ...] = ()
    follows_host: bool = False

    @property
    def rank(self) -> int:
        """Its global rank."""
        return self.timeline.rank

    def on_clock(self, correction_ms: float) -> "TracedRank":
        """The same with ``correction_ms`` added to all points in time."""
        spans = (
            replace(span, start_ms=span.start_ms + correction_ms, end_ms=span.end_ms + correction_ms)
            for span in self.timeline.spans
        )
        return replace(
            self,
            timeline=replace(self.timeline, spans=tuple(spans)),
            start_ms=self.start_ms + correction_ms,
            blocked=tuple((start + correction_ms, end + correction_ms, ms) for start, end, ms in self.blocked),
        )

    def thread_spans(self) -> list[Span]:
        """Ops, weight gradients and waits in the order of time."""
        return [span for span in self.timeline.spans if span.lane is not Lane.COMM]

    def messages(self) -> dict[Key, Span]:
        """Messages of expert parallelism, by start."""
        return dict(numbered(span for span in self.timeline.spans if span.lane is Lane.COMM and is_message(span.name)))


class CannotReplay(ValueError):  # noqa: N818 - the name states the problem
    """The ranks' traces don't belong to one step of one group."""


def kind_of(name: str) -> OpKind | None:
    """The kind of an op that is no weight gradient; None for others."""
    op = Op.find(name)
    return op.kind if op is not None and isinstance(op.kind, OpKind) else None


def is_message(name: str) -> bool:
    """Whether it is a message of expert parallelism."""
    kind = kind_of(name)
    return kind is not None and kind.is_message


def numbered(spans: Iterator[Span] | Sequence[Span]) -> Iterator[tuple[Key, Span]]:
    """Yields the spans with their keys."""
    seen: dict[str, int] = {}
    for span in spans:
        occurrence = seen.get(span.name, 0)
        seen[span.name] = occurrence + 1
        yield (span.name, occurrence), span
