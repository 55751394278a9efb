"""The simulated parts of a step on one pipeline stage, and what they add up to.

Without pairing a step is its micro-batches one after the other. With pairing it is the first forward, the pairs, and
the last backward. Beyond the first few, pairs are alike: only a few are played, and one stands for the rest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lancet.planning.simulation.buckets import Buckets
from megatron_lancet.planning.simulation.lowering import Step
from megatron_lancet.planning.simulation.phase_result import PhaseResult, Wait
from megatron_lancet.schedule.timeline import Span


@dataclass(frozen=True)
class Stage:
    """The steps of one pipeline stage.

    Attributes:
        saved_bytes: activations that the stage keeps of all micro-batches in flight.
        buckets: gradients that are reduced during the last micro-batch's backward; None for none.
    """

    number: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    saved_bytes: int
    buckets: Buckets | None = None


@dataclass(frozen=True)
class Played:
    """A simulated step on one stage.

    Attributes:
        num_micro_batches: micro-batches of the step.
        saved_bytes: activations that the stage keeps.
        forward: a forward that runs alone.
        backward: the same micro-batch's backward that runs alone, from the end of its forward on.
        last: like ``backward``, of the last micro-batch of a step, which reduces gradients.
        pairs: the pairs from the end of ``forward`` on; None without pairing.
        repeated: index of the pair that is like those that are not played.
    """

    stage: Stage
    num_micro_batches: int
    saved_bytes: int
    forward: PhaseResult
    backward: PhaseResult
    last: PhaseResult
    pairs: PhaseResult | None = None
    repeated: int = 0

    @property
    def end_ms(self) -> float:
        """Time of a micro-batch that runs alone."""
        return max(self.backward.end_ms)

    @property
    def last_end_ms(self) -> float:
        """The same, with the reduction of gradients."""
        return max(*self.last.end_ms, self.last.reduced_ms)

    @property
    def slot_ms(self) -> float:
        """Time of a micro-batch in the middle of a step."""
        return self.end_ms if self.pairs is None else self._pair_ms(self.pairs)

    @property
    def step_ms(self) -> float:
        """Time of all micro-batches, without the wait for reductions."""
        if self.pairs is None:
            return self.num_micro_batches * self.end_ms
        return self.end_ms + self._pairs_ms(self.pairs)

    @property
    def floor_ms(self) -> float:
        """Time of all micro-batches without exposed time in a backward, or in a pair."""
        if self.pairs is not None:
            return max(self.step_ms - self.exposed_ms(column)[0] for column in range(len(self.forward.end_ms)))
        ends = zip(self.backward.end_ms, self.backward.exposed_ms, strict=True)
        return self.num_micro_batches * max(end_ms - exposed_ms for end_ms, exposed_ms in ends)

    @property
    def peak_dw_bytes(self) -> int:
        """Most memory that deferred dWs keep alive on a rank."""
        return max(max(result.peak_dw_bytes) for result in (self.last, *([self.pairs] if self.pairs else [])))

    @property
    def num_early(self) -> int:
        """Most dWs of a micro-batch that ran early on a rank because memory was full."""
        return max(max(result.num_early) for result in (self.last, *([self.pairs] if self.pairs else [])))

    def exposed_ms(self, column: int) -> tuple[float, float]:
        """Exposed time of a rank in the step, and the part of it in which a forward waits."""
        before, after, last = (one.exposed_ms[column] for one in (self.forward, self.backward, self.last))
        if self.pairs is None:
            count = self.num_micro_batches
            return (before + after) * count + (last - after), before * count
        pairs, exposed_ms, forward_ms = self.pairs, before + last, before
        exposed_ms += pairs.exposed_ms[column]
        forward_ms += pairs.exposed_forward_ms[column]
        if number := self._num_repeated(pairs):
            start, end = pairs.marks[column][self.repeated - 1], pairs.marks[column][self.repeated]
            exposed_ms += number * (end.exposed_ms - start.exposed_ms)
            forward_ms += number * (end.exposed_forward_ms - start.exposed_forward_ms)
        return exposed_ms, forward_ms

    def waits(self, column: int) -> tuple[Wait, ...]:
        """Waits of a rank in one micro-batch, or in one pair from the middle of the step."""
        if self.pairs is None:
            return self.forward.waits[column] + self.backward.waits[column]
        marks = self.pairs.marks[column]
        number = self.repeated
        start_ms = marks[number - 1].end_ms if number else float("-inf")
        end_ms = marks[number].end_ms
        return tuple(wait for wait in self.pairs.waits[column] if start_ms <= wait.start_ms < end_ms)

    def end_waits(self, column: int) -> tuple[Wait, ...]:
        """Waits of a rank in the first forward and the last backward of a paired step; empty without pairing."""
        return () if self.pairs is None else self.forward.waits[column] + self.last.waits[column]

    def spans(self, column: int) -> tuple[Span, ...]:
        """Spans of a rank in the step, ordered by start."""
        return tuple(self._paired_spans(column, self.pairs) if self.pairs else self._plain_spans(column))

    def _plain_spans(self, column: int) -> Iterator[Span]:
        num_alike = self.num_micro_batches - 1
        alike, end = (_in_order(self.forward.spans[column] + one.spans[column]) for one in (self.backward, self.last))
        for index in range(num_alike):
            yield from _shifted(alike, index * self.end_ms)
        yield from _shifted(end, num_alike * self.end_ms)

    def _paired_spans(self, column: int, pairs: PhaseResult) -> list[Span]:
        number, marks = self._num_repeated(pairs), pairs.marks[column]
        spans = [*self.forward.spans[column], *_shifted(self.last.spans[column], self._pairs_ms(pairs))]
        if not number:
            return _in_order([*spans, *pairs.spans[column]])
        start_ms, end_ms, pair_ms = marks[self.repeated - 1].end_ms, marks[self.repeated].end_ms, self._pair_ms(pairs)
        for span in pairs.spans[column]:
            if span.start_ms < start_ms:
                copies = [0]
            else:
                copies = list(range(number + 1)) if span.start_ms < end_ms else [number]
            for index in copies:
                spans += _shifted([span], index * pair_ms)
        return _in_order(spans)

    def _num_repeated(self, pairs: PhaseResult) -> int:
        """Number of pairs of the step that were not played."""
        return self.num_micro_batches - 1 - len(pairs.marks[0])

    def _pair_ms(self, pairs: PhaseResult) -> float:
        """Time of one pair in the middle."""
        ends_ms = [max(mark.end_ms for mark in marks) for marks in zip(*pairs.marks, strict=True)]
        return ends_ms[self.repeated] - ends_ms[self.repeated - 1] if self.repeated else self._played_ms(pairs)

    def _played_ms(self, pairs: PhaseResult) -> float:
        return max(pairs.end_ms) - max(self.forward.end_ms)

    def _pairs_ms(self, pairs: PhaseResult) -> float:
        """Time of all pairs of the step."""
        number = self._num_repeated(pairs)
        return self._played_ms(pairs) + (number * self._pair_ms(pairs) if number else 0.0)


def _in_order(spans: Sequence[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.start_ms, span.end_ms))


def _shifted(spans: Sequence[Span], shift_ms: float) -> Iterator[Span]:
    for span in spans:
        yield Span(span.name, span.lane, span.start_ms + shift_ms, span.end_ms + shift_ms, span.num_bytes)
