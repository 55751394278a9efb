"""Tabulates exposed communication by layer and chunk: before and now, measured and predicted, with the reasons.

All times are means over ranks, per training step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_lancet.report.hidden_dws import HiddenDws, hidden_dws
from megatron_lancet.report.tables import right_aligned
from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.schedule.timeline import Lane, RankTimeline

_MAX_REASONS = 8
"""Number of reasons in the text; the data has all."""


@dataclass(frozen=True)
class ExposedMessage:
    """Time that compute waited for one message, summed over micro-batches.

    Attributes:
        predicted_ms: prediction of the cost model; None without one.
        reason: reason why the planner could not hide the message; None if unknown.
    """

    op: str
    measured_ms: float
    predicted_ms: float | None
    reason: str | None

    def why(self) -> str:
        """The planner's reason, where it predicts most of the wait; otherwise how much it predicts."""
        if self.predicted_ms is not None and self.predicted_ms < self.measured_ms / 2:
            return f"{self.predicted_ms:.2f} ms predicted"
        return self.reason or ""


@dataclass(frozen=True)
class ExposedChunk:
    """Messages of a chunk in a layer.

    Attributes:
        layer: from 1; None for messages outside the layers.
        chunk: from 0; None for messages of all chunks.
        measured_ms: sum over ``messages``, as ``predicted_ms``; see :class:`ExposedMessage`.
        before_ms: time under the previous plan, whose chunks may have been others; None without one.
        messages: messages with a measured or predicted wait, in the order of time.
    """

    layer: int | None
    chunk: int | None
    measured_ms: float
    predicted_ms: float | None
    before_ms: float | None
    messages: tuple[ExposedMessage, ...]


@dataclass(frozen=True)
class ExposedTable:
    """Exposed time of a step, in all and by chunk.

    Attributes:
        predicted_ms: prediction of the cost model; None without one.
        before_ms: time under the previous plan; None without one.
        chunks: chunks by layer, those outside the layers last, then by chunk number.
        weight_grads: how much of the step's weight gradients ran during messages; None if it had none of their own.
        step: number of the traced step; None if unknown.
        step_ms: its time on the slowest rank; None if unknown.
    """

    measured_ms: float
    predicted_ms: float | None
    before_ms: float | None
    chunks: tuple[ExposedChunk, ...]
    weight_grads: HiddenDws | None = None
    step: int | None = None
    step_ms: float | None = None

    def as_text(self) -> str:
        """Returns a table with a line for each layer and chunk, weight gradients, and reasons, longest wait first."""
        table = [["layer", "chunk", "before", "now", "predicted"]]
        shown = [0, 1, *([2] if self.before_ms is not None else []), 3, *([4] if self.predicted_ms is not None else [])]
        for layer in dict.fromkeys(chunk.layer for chunk in self.chunks):
            parts = [chunk for chunk in self.chunks if chunk.layer == layer]
            label = "other" if layer is None else str(layer)
            if len(parts) > 1:
                table.append(_line(label, "all", *_sums(parts)))
                label = ""
            for part in parts:
                number = "-" if part.chunk is None else str(part.chunk)
                table.append(_line(label, number, part.before_ms, part.measured_ms, part.predicted_ms))
        table.append(_line("all", "", self.before_ms, self.measured_ms, self.predicted_ms))
        cells, widths = [[row[column] for column in shown] for row in table], [(7, 5, 9, 9, 9)[at] for at in shown]
        lines = [f"  {line}" for line in right_aligned(cells, widths, " ")]
        forward_ms, backward_ms = self.measured_in(Phase.FORWARD), self.measured_in(Phase.INPUT_GRAD)
        lines.append(f"  of it {forward_ms:.2f} for messages of forwards, {backward_ms:.2f} for messages of backwards")
        by_kind = ", ".join(f"{kind} {ms:.2f}" for kind, ms in self.measured_by_kind().items())
        lines += [f"  of it by message: {by_kind}"] if by_kind else []
        hidden = [] if self.weight_grads is None else [f"  {self.weight_grads.as_text()}"]
        return "\n".join([self._title(), *lines, *hidden, *self._reasons()])

    def _title(self) -> str:
        if self.step is None or self.step_ms is None:
            return "exposed ms per step, mean over ranks"
        return (
            f"exposed ms of traced step {self.step}, which took {self.step_ms:.1f} ms (one step; the figures above are "
            "medians), mean over ranks"
        )

    def measured_in(self, phase: Phase) -> float:
        """Time that compute waited for the messages of a phase."""
        messages = [message for chunk in self.chunks for message in chunk.messages]
        return sum(message.measured_ms for message in messages if _phase(message.op) is phase)

    def measured_by_kind(self) -> dict[str, float]:
        """Time that compute waited for messages of each kind, forward and backward, the longest first."""
        totals: dict[str, float] = {}
        for message in (message for chunk in self.chunks for message in chunk.messages):
            op = Op.find(message.op)
            kind = message.op if op is None else str(op.kind)
            totals[kind] = totals.get(kind, 0.0) + message.measured_ms
        return dict(sorted(((kind, ms) for kind, ms in totals.items() if ms > 0), key=lambda item: -item[1]))

    def _reasons(self) -> Iterable[str]:
        messages = [message for chunk in self.chunks for message in chunk.messages if message.reason is not None]
        messages.sort(key=lambda message: -message.measured_ms)
        for message in messages[:_MAX_REASONS]:
            yield f"  {message.op}: {message.measured_ms:.2f} ms, {message.why()}"
        if len(messages) > _MAX_REASONS:
            yield f"  and {len(messages) - _MAX_REASONS} more"


def exposed_table(
    measured: Sequence[RankTimeline],
    predicted: Sequence[RankTimeline] = (),
    before: Sequence[RankTimeline] = (),
    reasons: Mapping[str, str] | None = None,
    step: int | None = None,
) -> ExposedTable:
    """Returns the table of a step.

    Args:
        measured: timeline of each rank.
        predicted: predicted timelines of the same ranks or some of them; empty without a prediction.
        before: timelines of a step under the previous plan; empty without one.
        reasons: reasons why messages stayed exposed, by op name.
        step: number of the step; None if unknown.
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
        weight_grads=hidden_dws(measured),
        step=step,
        step_ms=max((timeline.step_ms for timeline in measured), default=None),
    )


def waits_ms(timelines: Sequence[RankTimeline]) -> dict[str, float]:
    """Returns the time waited for each message, mean over the ranks, by op name in the order of the first wait."""
    totals: dict[str, float] = {}
    for timeline in timelines:
        for span in timeline.spans:
            if span.lane is Lane.WAIT:
                totals[span.name] = totals.get(span.name, 0.0) + span.ms / len(timelines)
    return totals


def _place(name: str) -> tuple[int | None, int | None]:
    op = Op.find(name)
    return (None, None) if op is None else (op.layer, op.chunk)


def _phase(name: str) -> Phase | None:
    op = Op.find(name)
    return None if op is None else op.phase


def _place_order(place: tuple[int | None, int | None]) -> tuple[float, float]:
    layer, chunk = place
    return (float("inf") if layer is None else layer, float("inf") if chunk is None else chunk)


def _sums(parts: Sequence[ExposedChunk]) -> tuple[float | None, float, float | None]:
    def total(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    measured_ms = sum(part.measured_ms for part in parts)
    return total(part.before_ms for part in parts), measured_ms, total(part.predicted_ms for part in parts)


def _line(layer: str, chunk: str, *times_ms: float | None) -> list[str]:
    return [layer, chunk, *("-" if ms is None else f"{ms:.2f}" for ms in times_ms)]
