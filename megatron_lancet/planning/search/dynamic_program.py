"""Lancet's dynamic program over segments (section 5.2): ``T(n) = min over i, way of T(i) + P(i, n, way)``.

P is the two-stream simulation of layers i..n alone, forward and backward. T is additive because chunks meet at the
end of a segment. That is exact where ranks are alike and weight gradients run at once. Otherwise it is an estimate:
ranks drift apart over a segment's end, and deferred weight gradients are carried over it. So the dynamic program
proposes, and simulations of whole plans decide.

P depends on layers by their kinds only. Beyond ``EXACT_LAYERS`` layers each further one adds what it adds to the few
layers before it: pipelines of chunks get periodic soon.

With a memory bound T has a second argument, what is kept so far beyond the least that is possible, in ``NUM_BUCKETS``
parts of the room that there is. Each segment's memory is rounded up, so what the program proposes fits.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from megatron_lancet.planning.profile import LayerKind
from megatron_lancet.planning.search.search_space import SearchSpace, Way, with_open_end
from megatron_lancet.planning.simulation.lowering import backward
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.schedule.dw_queue import AT_ONCE, DwRules
from megatron_lancet.schedule.ops import Phase
from megatron_lancet.schedule.plan import ALL_TO_ALLS_PER_LAYER, DwPolicy, Segment

EXACT_LAYERS = 6
_CLOSE_MS = 1e-9

_LETTERS = {LayerKind.MOE: "m", LayerKind.DENSE: "d", LayerKind.NONE: "n"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
NUM_BUCKETS = 48


class DwGuess(StrEnum):
    """What P takes weight gradients for."""

    AT_ONCE = "at once"
    """They run at once: exact for such plans."""
    ALONE = "alone"
    """They fill the segment's own gaps, and what is left runs at its end: too pessimistic for short segments."""
    ANYWHERE = "anywhere"
    """Any of them fills any gap of the backward: too optimistic."""


class _Best(NamedTuple):
    """Cheapest way to run the layers up to some point: what it costs, its last segment, and what was used before."""

    ms: float
    num_segments: int
    num_chunks: int
    start: int
    used_before: int
    way: Way | None


class _Option(NamedTuple):
    """A way to run a segment, with its P and the buckets of memory that it takes."""

    ms: float
    num_buckets: int
    way: Way


class DynamicProgram:
    """Proposes segments for a simulator's model; costs are remembered by the sequence of layer kinds."""

    def __init__(self, simulator: Simulator, space: SearchSpace, exact_layers: int = EXACT_LAYERS) -> None:
        self._simulator = simulator
        self._space = space
        self._exact_layers = exact_layers
        saved = simulator.costs.saved_bytes
        kinds = sorted(set(simulator.model.layer_kinds))
        self._saved_bytes = {
            _LETTERS[kind]: [saved(kind, way.chunk_dim, way.num_chunks) for way in space.ways] for kind in kinds
        }
        self._times: dict[tuple[DwGuess, str], tuple[float, ...]] = {}

    def proposals(self) -> Iterator[tuple[Segment, ...]]:
        """The cheapest segments for each guess about weight gradients; smaller ones too where they don't fit."""
        limits = self._space.limits
        for guess in DwGuess:
            policy = DwPolicy.NONE if guess is DwGuess.AT_ONCE else DwPolicy.FILL
            if policy not in limits.dw_policies:
                continue
            fastest = self.best_segments(guess)
            assert fastest is not None
            yield fastest
            if limits.max_memory_bytes is None:
                continue
            room_bytes = limits.max_memory_bytes - self._dw_bytes(fastest, policy)
            if self._simulator.saved_bytes(fastest) > room_bytes:
                smaller = self.best_segments(guess, room_bytes)
                if smaller is not None:
                    yield smaller

    def best_segments(self, guess: DwGuess, room_bytes: int | None = None) -> tuple[Segment, ...] | None:
        """The cheapest segments.

        Args:
            room_bytes: bound of kept activations on a rank; None for no bound.

        Returns:
            None if nothing fits into ``room_bytes``.
        """
        model, chosen = self._simulator.model, []
        for stage in sorted(set(model.stage_of_layer)):
            runs = [run for run in self._space.runs if model.stage_of_layer[run[0] - 1] == stage]
            room = None if room_bytes is None else self._simulator.room_for_layers(stage, room_bytes)
            found = self._of_stage(runs, guess, room)
            if found is None:
                return None
            chosen += found
        return with_open_end(sorted(chosen, key=lambda segment: segment.first_layer))

    def _dw_bytes(self, segments: tuple[Segment, ...], policy: DwPolicy) -> int:
        """Peak of deferred dWs in the narrowest window."""
        plan = next(plan for plan in self._space.dw_options(segments) if plan.dw_policy is policy)
        return self._simulator.predict(plan).peak_dw_bytes

    def _of_stage(
        self, runs: Sequence[tuple[int, int]], guess: DwGuess, room_bytes: int | None
    ) -> list[Segment] | None:
        """T(n) = min over i of T(i) + P(i, n), over the layers of one stage; None if there is no room for them."""
        numbers = [number for first, last in runs for number in range(first, last + 1)]
        ends = [
            end for (first, last), end in zip(runs, _running_sums(runs), strict=True) for _ in range(first, last + 1)
        ]
        letters = "".join(_LETTERS[self._simulator.model.layer_kinds[number - 1]] for number in numbers)
        bucket_bytes = None
        if room_bytes is not None:
            spare_bytes = room_bytes - self._least_bytes(letters)
            if spare_bytes < 0:
                return None
            bucket_bytes = spare_bytes / NUM_BUCKETS
        options: dict[str, list[_Option]] = {}
        best: list[dict[int, _Best]] = [{0: _Best(0.0, 0, 0, 0, 0, None)}, *({} for _ in numbers)]
        for start, run_end in enumerate(ends):
            for end in range(start + 1, run_end + 1):
                layers = letters[start:end]
                if layers not in options:
                    options[layers] = self._options(layers, guess, bucket_bytes)
                _extend(best[start], start, options[layers], best[end])
            best[start + 1] = _undominated(best[start + 1])
        return [way.segment(numbers[start], numbers[end - 1]) for start, end, way in _way_back(best)]

    def _least_bytes(self, letters: str) -> int:
        return sum(letters.count(letter) * min(saved) for letter, saved in self._saved_bytes.items())

    def _options(self, letters: str, guess: DwGuess, bucket_bytes: float | None) -> list[_Option]:
        """The fastest ways for each amount of memory, the least first.

        Of equally fast ones the first: ways are ordered from simple to complex, so one chunk must be strictly beaten.
        """
        least_bytes = self._least_bytes(letters)
        counts = [(letters.count(letter), saved) for letter, saved in self._saved_bytes.items()]
        options = []
        for index, ms in enumerate(self._segment_ms(guess, letters)):
            num_buckets = 0
            if bucket_bytes is not None:
                spare_bytes = sum(count * saved[index] for count, saved in counts) - least_bytes
                if spare_bytes > bucket_bytes * NUM_BUCKETS:
                    continue
                num_buckets = ceil(spare_bytes / bucket_bytes) if spare_bytes else 0
            options.append(_Option(ms, num_buckets, self._space.ways[index]))
        options.sort(key=lambda option: option.num_buckets)
        kept: list[_Option] = []
        for option in options:
            if not kept or option.ms < kept[-1].ms - _CLOSE_MS:
                if kept and kept[-1].num_buckets == option.num_buckets:
                    kept.pop()
                kept.append(option)
        return kept

    def _segment_ms(self, guess: DwGuess, kinds: str) -> tuple[float, ...]:
        """P of these layers for each way."""
        known = self._times.get((guess, kinds))
        if known is None:
            if len(kinds) <= self._exact_layers:
                known = tuple(self._played_ms(guess, kinds, way) for way in self._space.ways)
            else:
                window = kinds[-self._exact_layers :]
                known = tuple(
                    shorter + longer - without
                    for shorter, longer, without in zip(
                        self._segment_ms(guess, kinds[:-1]),
                        self._segment_ms(guess, window),
                        self._segment_ms(guess, window[:-1]),
                        strict=True,
                    )
                )
            self._times[guess, kinds] = known
        return known

    def _played_ms(self, guess: DwGuess, kinds: str, way: Way) -> float:
        simulator, limits = self._simulator, self._space.limits
        layers = [(number, _KINDS[letter]) for number, letter in enumerate(kinds, start=1)]
        steps = simulator.lowering.forward(layers, way.segment(1, len(kinds)))
        forward = simulator.play(steps, Phase.FORWARD, AT_ONCE, simulator.start_ms())
        rules = AT_ONCE
        if guess is DwGuess.ALONE:
            window = ALL_TO_ALLS_PER_LAYER * way.num_chunks * max(limits.dw_window_layers, default=1)
            rules = DwRules(window, limits.dw_memory_bytes)
        result = simulator.play(backward(steps), Phase.INPUT_GRAD, rules, forward.end_ms)
        if guess is not DwGuess.ANYWHERE:
            return max(result.end_ms)
        columns = range(len(result.end_ms))
        dw_ms = [sum(cost.ms for *_, a in steps if a.weight_grads for cost in a.weight_grads[c]) for c in columns]
        return max(result.end_ms[c] - min(result.exposed_ms[c], dw_ms[c]) for c in columns)


def _running_sums(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Where each run ends among the layers of its stage."""
    return list(accumulate(last - first + 1 for first, last in runs))


def _extend(before: dict[int, _Best], start: int, options: Sequence[_Option], after: dict[int, _Best]) -> None:
    """Append a segment to each best way to run the layers before it, in each way that there is room for."""
    for ms, num_buckets, way in options:
        for used, so_far in before.items():
            total = used + num_buckets
            known = after.get(total)
            if total > NUM_BUCKETS or (known is not None and so_far.ms + ms > known.ms + _CLOSE_MS):
                continue
            num_chunks = so_far.num_chunks + way.num_chunks
            option = _Best(so_far.ms + ms, so_far.num_segments + 1, num_chunks, start, used, way)
            if _beats(option, known):
                after[total] = option


def _undominated(states: dict[int, _Best]) -> dict[int, _Best]:
    """Without those that need more memory and are no better."""
    kept: dict[int, _Best] = {}
    best: _Best | None = None
    for used in sorted(states):
        if _beats(states[used], best):
            best = kept[used] = states[used]
    return kept


def _way_back(best: Sequence[dict[int, _Best]]) -> list[tuple[int, int, Way]]:
    """Segments of the cheapest way to run all layers, as (start, end, way)."""
    end = len(best) - 1
    used = max(best[end])  # what needs most memory is fastest, or it would be dominated
    segments = []
    while end > 0:
        last = best[end][used]
        assert last.way is not None
        segments.append((last.start, end, last.way))
        end, used = last.start, last.used_before
    return segments[::-1]


def _beats(option: _Best, other: _Best | None) -> bool:
    """Strictly faster, or as fast and simpler: fewer segments, then fewer chunks."""
    if other is None or option.ms < other.ms - _CLOSE_MS:
        return True
    if option.ms > other.ms + _CLOSE_MS:
        return False
    return (option.num_segments, option.num_chunks) < (other.num_segments, other.num_chunks)
