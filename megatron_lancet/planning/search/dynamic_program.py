"""Lancet's dynamic program over segments (section 5.2): ``T(n) = min over i, choice of T(i) + P(i, n, choice)``.

P is the two-stream simulation of layers i..n alone, forward and backward. T is additive because chunks synchronize at
the end of a segment. That is exact if ranks are alike and weight gradients run at once. Otherwise it is an estimate:
ranks drift apart across the end of a segment, and deferred weight gradients are carried across it. So the dynamic
program proposes segments, and simulations of whole plans decide.

P depends on the kinds of the layers only. Beyond ``EXACT_LAYERS`` layers, each further layer adds as much as it adds to
the few layers before it, because pipelines of chunks soon become periodic.

With a memory bound, T has a second argument: the memory in use beyond the smallest possible, in units of the spare
memory divided by ``NUM_BUCKETS``. The memory of each segment is rounded up, so the proposed segments fit.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from megatron_lancet.planning.search.search_space import SearchSpace
from megatron_lancet.planning.simulation.lowering import backward
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.schedule.dw_queue import AT_ONCE, DwRules
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import Phase
from megatron_lancet.schedule.plan import DwPolicy, Segment

EXACT_LAYERS = 6
_CLOSE_MS = 1e-9
NUM_BUCKETS = 48

type Kinds = tuple[LayerKind, ...]
"""Kinds of neighbouring layers, in order: P is the same for equal ones."""


class DwGuess(StrEnum):
    """How P accounts for weight gradients."""

    AT_ONCE = "at once"
    """They run at once: exact for such plans."""
    ALONE = "alone"
    """They fill the gaps of their own segment, and the rest runs at its end: too pessimistic for short segments."""
    ANYWHERE = "anywhere"
    """Any of them fills any gap of the backward: too optimistic."""


class _Best(NamedTuple):
    """The fastest segments up to a layer: their time, the last one (from ``start``), and the buckets before it."""

    ms: float
    num_segments: int
    num_chunks: int
    start: int
    used_before: int
    choice: Segment | None


class _Option(NamedTuple):
    """A choice for a segment, with its P and the number of memory buckets that it takes."""

    ms: float
    num_buckets: int
    choice: Segment


class DynamicProgram:
    """Proposes segments for a simulator's model; P is cached by guess and layer kinds."""

    def __init__(self, simulator: Simulator, space: SearchSpace) -> None:
        self._simulator = simulator
        self._space = space
        saved = simulator.costs.saved_bytes
        self._saved_bytes = {
            kind: [saved(kind, choice.chunk_dim, choice.num_chunks, space.dispatch) for choice in space.choices]
            for kind in sorted(set(simulator.model.layer_kinds))
        }
        self._times: dict[tuple[DwGuess, Kinds], tuple[float, ...]] = {}

    def proposals(self) -> Iterator[tuple[Segment, ...]]:
        """The fastest segments for each guess; if they exceed the memory bound, also the fastest that fit."""
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
            if self._simulator.kept.on_fullest_stage(fastest, self._space.dispatch) > room_bytes:
                smaller = self.best_segments(guess, room_bytes)
                if smaller is not None:
                    yield smaller

    def best_segments(self, guess: DwGuess, room_bytes: int | None = None) -> tuple[Segment, ...] | None:
        """The fastest segments, or None if none fit into ``room_bytes``.

        Args:
            room_bytes: bound on the activations that a rank keeps; None for no bound.
        """
        model, chosen = self._simulator.model, []
        for stage in sorted(set(model.stage_of_layer)):
            runs = [run for run in self._space.runs if model.stage_of_layer[run[0] - 1] == stage]
            room = None if room_bytes is None else self._simulator.kept.room_for_layers(stage, room_bytes)
            found = self._solve_stage(runs, guess, room)
            if found is None:
                return None
            chosen += found
        return self._space.joined(sorted(chosen, key=lambda segment: segment.first_layer))

    def _dw_bytes(self, segments: tuple[Segment, ...], policy: DwPolicy) -> int:
        """Peak memory of deferred dWs in the smallest window."""
        plan = next(plan for plan in self._space.dw_options(segments) if plan.dw_policy is policy)
        return self._simulator.predict(plan).peak_dw_bytes

    def _solve_stage(
        self, runs: Sequence[tuple[int, int]], guess: DwGuess, room_bytes: int | None
    ) -> list[Segment] | None:
        """Solves T for the layers of one stage; None if they don't fit."""
        numbers = [number for first, last in runs for number in range(first, last + 1)]
        # For each layer of the stage, by index in ``numbers``, the end of its run.
        sizes = [last - first + 1 for first, last in runs]
        ends = [end for size, end in zip(sizes, accumulate(sizes), strict=True) for _ in range(size)]
        kinds = tuple(self._simulator.model.layer_kinds[number - 1] for number in numbers)
        bucket_bytes = None
        if room_bytes is not None:
            spare_bytes = room_bytes - self._least_bytes(kinds)
            if spare_bytes < 0:
                return None
            bucket_bytes = spare_bytes / NUM_BUCKETS
        options: dict[Kinds, list[_Option]] = {}
        best: list[dict[int, _Best]] = [{0: _Best(0.0, 0, 0, 0, 0, None)}, *({} for _ in numbers)]
        for start, run_end in enumerate(ends):
            for end in range(start + 1, run_end + 1):
                layers = kinds[start:end]
                if layers not in options:
                    options[layers] = self._options(layers, guess, bucket_bytes)
                _extend(best[start], start, options[layers], best[end])
            best[start + 1] = _undominated(best[start + 1])
        return [choice.with_layers(numbers[start], numbers[end - 1]) for start, end, choice in _trace_back(best)]

    def _least_bytes(self, kinds: Kinds) -> int:
        return sum(kinds.count(kind) * min(saved) for kind, saved in self._saved_bytes.items())

    def _options(self, kinds: Kinds, guess: DwGuess, bucket_bytes: float | None) -> list[_Option]:
        """The fastest option for each number of buckets, the fewest first, without dominated ones.

        The first of equally fast choices is kept. They are ordered from simple to complex, so others must be strictly
        faster than one chunk.
        """
        least_bytes = self._least_bytes(kinds)
        counts = [(kinds.count(kind), saved) for kind, saved in self._saved_bytes.items()]
        options = []
        for index, ms in enumerate(self._segment_ms(guess, kinds)):
            num_buckets = 0
            if bucket_bytes is not None:
                spare_bytes = sum(count * saved[index] for count, saved in counts) - least_bytes
                if spare_bytes > bucket_bytes * NUM_BUCKETS:
                    continue
                num_buckets = ceil(spare_bytes / bucket_bytes) if spare_bytes else 0
            options.append(_Option(ms, num_buckets, self._space.choices[index]))
        options.sort(key=lambda option: option.num_buckets)
        kept: list[_Option] = []
        for option in options:
            if not kept or option.ms < kept[-1].ms - _CLOSE_MS:
                if kept and kept[-1].num_buckets == option.num_buckets:
                    kept.pop()
                kept.append(option)
        return kept

    def _segment_ms(self, guess: DwGuess, kinds: Kinds) -> tuple[float, ...]:
        """P of these layers for each choice, in ms."""
        known = self._times.get((guess, kinds))
        if known is None:
            if len(kinds) <= EXACT_LAYERS:
                known = tuple(self._played_ms(guess, kinds, choice) for choice in self._space.choices)
            else:
                window = kinds[-EXACT_LAYERS:]
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

    def _played_ms(self, guess: DwGuess, kinds: Kinds, choice: Segment) -> float:
        simulator, limits = self._simulator, self._space.limits
        layers = list(enumerate(kinds, start=1))
        steps = simulator.lowering.forward(layers, choice.with_layers(1, len(kinds)), self._space.dispatch)
        forward = simulator.play(steps, Phase.FORWARD, AT_ONCE, simulator.start_ms())
        rules = AT_ONCE
        if guess is DwGuess.ALONE:
            per_layer = choice.with_layers(1, len(kinds)).all_to_alls_per_layer(self._space.dispatch)
            rules = DwRules(per_layer * max(limits.dw_window_layers, default=1), limits.dw_memory_bytes)
        result = simulator.play(backward(steps), Phase.INPUT_GRAD, rules, forward.end_ms)
        if guess is not DwGuess.ANYWHERE:
            return max(result.end_ms)
        columns = range(len(result.end_ms))
        dw_ms = [sum(cost.ms for *_, a in steps if a.weight_grads for cost in a.weight_grads[c]) for c in columns]
        return max(result.end_ms[c] - min(result.exposed_ms[c], dw_ms[c]) for c in columns)


def _extend(before: dict[int, _Best], start: int, options: Sequence[_Option], after: dict[int, _Best]) -> None:
    """Appends a segment from ``start`` on, with each option that fits, to the best segments before it."""
    for ms, num_buckets, choice in options:
        for used, so_far in before.items():
            total = used + num_buckets
            known = after.get(total)
            if total > NUM_BUCKETS or (known is not None and so_far.ms + ms > known.ms + _CLOSE_MS):
                continue
            num_chunks = so_far.num_chunks + choice.num_chunks
            option = _Best(so_far.ms + ms, so_far.num_segments + 1, num_chunks, start, used, choice)
            if _beats(option, known):
                after[total] = option


def _undominated(states: dict[int, _Best]) -> dict[int, _Best]:
    """Drops the states that need more memory than another one without being better."""
    kept: dict[int, _Best] = {}
    best: _Best | None = None
    for used in sorted(states):
        if _beats(states[used], best):
            best = kept[used] = states[used]
    return kept


def _trace_back(best: Sequence[dict[int, _Best]]) -> list[tuple[int, int, Segment]]:
    """The fastest segments of all layers, as (start, end, choice)."""
    end = len(best) - 1
    used = max(best[end])  # of undominated states, the one with the most memory is the fastest
    segments = []
    while end > 0:
        last = best[end][used]
        assert last.choice is not None
        segments.append((last.start, end, last.choice))
        end, used = last.start, last.used_before
    return segments[::-1]


def _beats(option: _Best, other: _Best | None) -> bool:
    """Whether ``option`` is strictly faster, or as fast with fewer segments, or else with fewer chunks."""
    if other is None or option.ms < other.ms - _CLOSE_MS:
        return True
    if option.ms > other.ms + _CLOSE_MS:
        return False
    return (option.num_segments, option.num_chunks) < (other.num_segments, other.num_chunks)
