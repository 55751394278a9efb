"""What moving experts could gain at most, from the recorded load of each step. Neither torch nor Megatron.

The figure of a step and layer is the rows of the most loaded rank over the mean: all ranks wait for that rank. With a
placement that follows the load, a step is at best as much faster as this figure falls, if all of it were work on rows.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.tables import aligned
from megatron_lancet.planning.load.expert_load import ExpertLoad, LayerLoad
from megatron_lancet.planning.load.placement import (
    Placement,
    contiguous,
    most_over_mean,
    rows_of_ranks,
    solve,
    swapped,
)
from megatron_lancet.planning.load.rebalance import Costs, decide, most_sent

INTERVALS = (10, 20, 50)
"""Steps after which experts may move."""

FREE = Costs(exposed_ms=1.0, noise_ms=0.0, expert_bytes=0, ms_per_byte=0.0, num_steps=1)
"""Moves take no time, and any gain counts."""

type Steps = Sequence[Sequence[LayerLoad]]
"""The load of the layers by step."""


@dataclass(frozen=True)
class Bound:
    """A way to place experts.

    Attributes:
        most_over_mean: mean over layers and steps.
        num_moves: experts that a rank has sent, summed over layers and steps.
    """

    name: str
    most_over_mean: float
    num_moves: int


def read_loads(path: Path) -> Steps:
    """Reads what :class:`~benchmarks.drift.in_rank.LoadOfSteps` has written."""
    return [
        [LayerLoad(number, tuple(map(tuple, rows))) for number, rows in enumerate(json.loads(line), 1)]
        for line in path.read_text().splitlines()
    ]


def summed(steps: Steps) -> list[LayerLoad]:
    """The load of several steps."""
    return [
        LayerLoad(
            layers[0].layer, tuple(_sums(of_source) for of_source in zip(*(one.rows for one in layers), strict=True))
        )
        for layers in zip(*steps, strict=True)
    ]


def _sums(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))


def placed(steps: Steps) -> list[Placement]:
    """The best placement of each layer for the load of several steps."""
    return [solve(layer, len(layer.rows)) for layer in summed(steps)]


def decided(window: Steps, now: Sequence[Placement]) -> list[Placement]:
    """The placements after the swaps that a run would make at the end of a window, were they free."""
    half = len(window) // 2
    first, second = (ExpertLoad(len(part), len(now), tuple(summed(part))) for part in (window[:half], window[half:]))
    found = decide(first, second, dict(enumerate(now, 1)), FREE)
    return [swapped(placement, found.swaps.get(number, ())) for number, placement in enumerate(now, 1)]


def bounds(steps: Steps, num_first: int) -> Iterator[Bound]:
    """The figures of all steps after the first ``num_first``, by which experts are placed at the start."""
    start, rest = placed(steps[:num_first]), steps[num_first:]
    none = [contiguous(len(layer.rows[0])) for layer in steps[0]]
    yield _bound("no placement", rest, none, lambda _, __: None)
    yield _bound(f"at the start, by {num_first} steps", rest, start, lambda _, __: None)
    for interval in INTERVALS:

        def by_past(index: int, _: Sequence[Placement], interval: int = interval) -> list[Placement] | None:
            return placed(rest[index - interval : index]) if index and index % interval == 0 else None

        def by_future(index: int, _: Sequence[Placement], interval: int = interval) -> list[Placement] | None:
            return placed(rest[index : index + interval]) if index % interval == 0 else None

        def by_rule(index: int, now: Sequence[Placement], interval: int = interval) -> list[Placement] | None:
            return decided(rest[index - interval : index], now) if index and index % interval == 0 else None

        yield _bound(f"every {interval} steps, as --lancet-rebalance-interval", rest, start, by_rule)
        yield _bound(f"every {interval} steps, by the last {interval}", rest, start, by_past)
        yield _bound(f"every {interval} steps, by the next {interval}", rest, start, by_future)
    yield _bound("each step, by itself", rest, start, lambda index, _: placed(rest[index : index + 1]))


def _bound(
    name: str,
    steps: Steps,
    placements: list[Placement],
    again: Callable[[int, Sequence[Placement]], list[Placement] | None],
) -> Bound:
    """
    Args:
        again: new placements in front of the step with this index, from those that are there; None to keep them.
    """
    figures, num_moves = [], 0
    for index, layers in enumerate(steps):
        found = again(index, placements)
        if found is not None:
            ranks = len(layers[0].rows)
            num_moves += sum(most_sent(now, then, ranks) for now, then in zip(placements, found, strict=True))
            placements = found
        for layer, placement in zip(layers, placements, strict=True):
            figures.append(most_over_mean(rows_of_ranks(layer.rows_per_expert, placement, len(layer.rows))))
    return Bound(name, statistics.fmean(figures), num_moves)


def as_text(found: Sequence[Bound]) -> str:
    """The table; the last columns are against the second line."""
    start = found[1].most_over_mean
    lines = [["placement", "most loaded rank over mean", "of the step at most", "experts moved"]]
    for one in found:
        gain = 1 - one.most_over_mean / start
        lines.append([one.name, f"{one.most_over_mean:.3f}", f"{gain:+.1%}", str(one.num_moves)])
    return aligned(lines)
