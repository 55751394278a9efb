"""How much of the weight gradients of a traced step ran while an all-to-all was in flight."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_lancet.schedule.ops import PAYLOADS, Op, Phase
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span


@dataclass(frozen=True)
class HiddenDws:
    """Time of a step's weight gradients (dW), mean over ranks; on CUDA the device's.

    Attributes:
        total_ms: all of them.
        beside_ms: the part during which a payload all-to-all of the rank was in flight, from its launch (on CUDA from
            its start on the communication stream) to its arrival. Whether the rank would have waited for that message
            otherwise is not known.
    """

    total_ms: float
    beside_ms: float

    def as_text(self) -> str:
        """Returns one line."""
        return (
            f"weight gradients: {self.beside_ms:.2f} of {self.total_ms:.2f} ms while an all-to-all was in flight, "
            "mean over ranks"
        )


def hidden_dws(timelines: Sequence[RankTimeline]) -> HiddenDws | None:
    """Returns the times of a step, by the spans of its trace; None if it had no weight gradients of their own."""
    pairs = [_dws_and_messages(timeline) for timeline in timelines]
    if not any(dws for dws, _ in pairs):
        return None
    total_ms = sum(span.ms for dws, _ in pairs for span in dws)
    beside_ms = sum(_overlap_ms(dws, _union(messages)) for dws, messages in pairs)
    return HiddenDws(total_ms / len(timelines), beside_ms / len(timelines))


def _dws_and_messages(timeline: RankTimeline) -> tuple[list[Span], list[Span]]:
    dws, messages = [], []
    for span in timeline.spans:
        op = Op.find(span.name)
        if op is None:
            continue
        if span.lane is Lane.COMPUTE and op.phase is Phase.WEIGHT_GRAD:
            dws.append(span)
        elif span.lane is Lane.COMM and op.kind in PAYLOADS:
            messages.append(span)
    return dws, messages


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Returns the intervals that the spans cover, disjoint and in order."""
    covered: list[tuple[float, float]] = []
    for start_ms, end_ms in sorted((span.start_ms, span.end_ms) for span in spans):
        if covered and start_ms <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(covered[-1][1], end_ms)
        else:
            covered.append((start_ms, end_ms))
    return covered


def _overlap_ms(spans: Iterable[Span], covered: Sequence[tuple[float, float]]) -> float:
    """Returns the time of the spans within the intervals, which are disjoint and in order."""
    total_ms = 0.0
    for span in spans:
        index = bisect_right(covered, span.start_ms, key=lambda interval: interval[1])  # the first that ends later
        while index < len(covered) and covered[index][0] < span.end_ms:
            start_ms, end_ms = covered[index]
            total_ms += min(span.end_ms, end_ms) - max(span.start_ms, start_ms)
            index += 1
    return total_ms
