"""What communication stayed exposed: per layer and chunk, before and after, predicted and measured, and why.

All figures are means over ranks, per training step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.timeline import Lane, RankTimeline

_MAX_REASONS = 8
"""Lines of reasons in the text; the data has all."""


@dataclass(frozen=True)
class ExposedMessage:
    """Time in which compute stood still for one message.

    Attributes:
        op: its name.
        measured_ms: waited for it, in all micro-batches.
        predicted_ms: the same by the cost model; None without a prediction.
        reason: why it could not be hidden; None if nobody said.
    """

    op: str
    measured_ms: float
    predicted_ms: float | None
    reason: str | None


@dataclass(frozen=True)
class ExposedChunk:
    """The messages of a chunk in a layer.

    Attributes:
        layer: from 1; None for messages beside the layers.
        chunk: from 0; None for messages of all chunks.
        measured_ms: see :class:`ExposedMessage`; the sum over ``messages``.
        before_ms: under the plan compared with; None without one. It may have had other chunks than the plan has now.
        messages: those that compute stood still for, or should have, in the order of time.
    """

    layer: int | None
    chunk: int | None
    measured_ms: float
    predicted_ms: float | None
    before_ms: float | None
    messages: tuple[ExposedMessage, ...]


@dataclass(frozen=True)
class ExposedTable:
    """Exposed time of a step.

    Attributes:
        measured_ms: in all.
        predicted_ms: in all; None without a prediction.
        before_ms: in all, under the plan compared with; None without one.
        chunks: by layer, those beside the layers last, then by chunk.
    """

    measured_ms: float
    predicted_ms: float | None
    before_ms: float | None
    chunks: tuple[ExposedChunk, ...]

    def as_text(self) -> str:
        """A table with a line for each layer and chunk, then the reasons, the longest wait first."""
        head = f"  {'layer':>7} {'chunk':>5} {'before':>9} {'now':>9} {'predicted':>9}"
        lines = ["exposed ms per step, mean over ranks", head]
        for layer in dict.fromkeys(chunk.layer for chunk in self.chunks):
            parts = [chunk for chunk in self.chunks if chunk.layer == layer]
            label = "other" if layer is None else str(layer)
            if len(parts) > 1:
                lines.append(_line(label, "all", *_sums(parts)))
                label = ""
            for part in parts:
                number = "-" if part.chunk is None else str(part.chunk)
                lines.append(_line(label, number, part.before_ms, part.measured_ms, part.predicted_ms))
        lines.append(_line("all", "", self.before_ms, self.measured_ms, self.predicted_ms))
        return "\n".join([*lines, *self._reasons()])

    def _reasons(self) -> Iterable[str]:
        messages = [message for chunk in self.chunks for message in chunk.messages if message.reason is not None]
        messages.sort(key=lambda message: -message.measured_ms)
        for message in messages[:_MAX_REASONS]:
            yield f"  {message.op}: {message.measured_ms:.2f} ms, {message.reason}"
        if len(messages) > _MAX_REASONS:
            yield f"  and {len(messages) - _MAX_REASONS} more"


def exposed_table(
    measured: Sequence[RankTimeline],
    predicted: Sequence[RankTimeline] = (),
    before: Sequence[RankTimeline] = (),
    reasons: Mapping[str, str] | None = None,
) -> ExposedTable:
    """The table of a step.

    Args:
        measured: the step, of each rank.
        predicted: the same by the cost model, of the same ranks or some of them; empty if not predicted.
        before: a step under the plan compared with; empty if there is none.
        reasons: why a message stayed exposed, by its name.
    """
    now_ms, predicted_ms, before_ms = (waits_ms(timelines) for timelines in (measured, predicted, before))
    place_of = {name: _place(name) for name in (*now_ms, *predicted_ms, *before_ms)}
    chunks = []
    for layer, chunk in sorted(set(place_of.values()), key=_place_order):
        here = [name for name, place in place_of.items() if place == (layer, chunk)]
        names = [name for name in here if name in now_ms or name in predicted_ms]
        earlier = [name for name in here if name in before_ms]
        chunks.append(
            ExposedChunk(
                layer=layer,
                chunk=chunk,
                measured_ms=sum(now_ms.get(name, 0.0) for name in names),
                predicted_ms=sum(predicted_ms.get(name, 0.0) for name in names) if predicted else None,
                before_ms=sum(before_ms[name] for name in earlier) if before else None,
                messages=tuple(
                    ExposedMessage(
                        op=name,
                        measured_ms=now_ms.get(name, 0.0),
                        predicted_ms=predicted_ms.get(name, 0.0) if predicted else None,
                        reason=(reasons or {}).get(name),
                    )
                    for name in names
                ),
            )
        )
    return ExposedTable(
        measured_ms=sum(now_ms.values()),
        predicted_ms=sum(predicted_ms.values()) if predicted else None,
        before_ms=sum(before_ms.values()) if before else None,
        chunks=tuple(chunks),
    )


def waits_ms(timelines: Sequence[RankTimeline]) -> dict[str, float]:
    """Time waited for each message, mean over the ranks, by its name in the order of the first wait."""
    totals: dict[str, float] = {}
    for timeline in timelines:
        for span in timeline.spans:
            if span.lane is Lane.WAIT:
                totals[span.name] = totals.get(span.name, 0.0) + span.ms / len(timelines)
    return totals


def _place(name: str) -> tuple[int | None, int | None]:
    """Layer and chunk of a message; None for what its name does not say."""
    op = Op.find(name)
    return (None, None) if op is None else (op.layer, op.chunk)


def _place_order(place: tuple[int | None, int | None]) -> tuple[float, float]:
    layer, chunk = place
    return (float("inf") if layer is None else layer, float("inf") if chunk is None else chunk)


def _sums(parts: Sequence[ExposedChunk]) -> tuple[float | None, float, float | None]:
    def total(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    measured_ms = sum(part.measured_ms for part in parts)
    return total(part.before_ms for part in parts), measured_ms, total(part.predicted_ms for part in parts)


def _line(layer: str, chunk: str, before_ms: float | None, now_ms: float, predicted_ms: float | None) -> str:
    def figure(ms: float | None) -> str:
        return "-" if ms is None else f"{ms:.2f}"

    return f"  {layer:>7} {chunk:>5} {figure(before_ms):>9} {figure(now_ms):>9} {figure(predicted_ms):>9}"
