"""Measures the routing of rows: by layer and chunk, and its imbalance over the ranks of a group."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_lancet.planning.profile import ChunkRouting, ModelFacts
from megatron_lancet.profiler.op_times import op_key
from megatron_lancet.profiler.pace import MAX_RANKS
from megatron_lancet.runtime.trace import RoutedRows, StepTrace
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.plan import ChunkDim, Plan


class ChunkKey(NamedTuple):
    """A chunk of a layer; see :class:`ChunkRouting`."""

    layer: int
    chunk_dim: ChunkDim
    num_chunks: int
    chunk: int


Rows = Mapping[ChunkKey, RoutedRows]
"""Where the tokens of each chunk of a rank go."""


class RankRouting(NamedTuple):
    """Routing measured on one rank.

    Attributes:
        group: identifier of its expert-parallel group.
        place: its rank in the group.
        received: rows that its experts received in all traced steps, by layer.
        rows: rows of one micro-batch.
    """

    group: int
    place: int
    received: Mapping[int, int]
    rows: Rows


def rows_of_step(step: StepTrace, plan: Plan, model: ModelFacts) -> Rows:
    """Returns the rows of the first micro-batch of a step that ran under ``plan``, with any dispatch.

    In a large group only those of whole micro-batches: each rank has a number for each other one, and the simulator
    does not tell the chunks of such a group apart.
    """
    found = {}
    for name, rows in step.routed.items():
        op = op_key(Op.parse(name), plan, model)
        if op.num_chunks == 1 or model.ep_size <= MAX_RANKS:
            found[ChunkKey(layer_of(name), op.chunk_dim, op.num_chunks, op.chunk)] = rows
    return found


def layer_of(name: str) -> int:
    """Returns the layer of an op that belongs to one."""
    layer = Op.parse(name).layer
    assert layer is not None, name
    return layer


def chunk_routing(ranks: Sequence[RankRouting], ep_size: int) -> tuple[ChunkRouting, ...]:
    """Returns the routing of each layer and chunk in the first group that has the layer.

    The result is empty in a mocked world, where only one of the ranks exists, and for a single rank.
    """
    by_key: defaultdict[tuple[int, ChunkKey], dict[int, RoutedRows]] = defaultdict(dict)
    for rank in ranks:
        for key, rows in rank.rows.items():
            by_key[rank.group, key][rank.place] = rows
    found: dict[ChunkKey, ChunkRouting] = {}
    for (_, key), rows_of in sorted(by_key.items()):
        if ep_size > 1 and set(rows_of) == set(range(ep_size)) and key not in found:
            of_ranks = [rows_of[place] for place in range(ep_size)]
            rows_to, tokens_to = [its.rows for its in of_ranks], [its.tokens for its in of_ranks]
            found[key] = ChunkRouting(
                *key,
                sent=_to_others(rows_to),
                received=tuple(map(sum, zip(*rows_to, strict=True))),
                sent_tokens=_to_others(tokens_to),
                received_tokens=_to_others(list(zip(*tokens_to, strict=True))),
            )
    return tuple(found[key] for key in sorted(found))


def _to_others(numbers: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the sum of each line of a square table without the number on the diagonal."""
    return tuple(sum(line) - line[place] for place, line in enumerate(numbers))


def received_shares(ranks: Sequence[RankRouting], ep_size: int) -> tuple[float, ...]:
    """Returns each rank's share of the rows that its expert-parallel group received, median over layers and groups.

    In a mocked world, where only one of the ranks exists, all shares are equal.
    """
    if {rank.place for rank in ranks} != set(range(ep_size)):
        return (1 / ep_size,) * ep_size
    totals: defaultdict[tuple[int, int], int] = defaultdict(int)
    for rank in ranks:
        for layer, number in rank.received.items():
            totals[rank.group, layer] += number
    shares: defaultdict[int, list[float]] = defaultdict(list)
    for rank in ranks:
        for layer, number in rank.received.items():
            total = totals[rank.group, layer]
            shares[rank.place].append(number / total if total else 1 / ep_size)
    medians = [statistics.median(shares[place]) if shares[place] else 1 / ep_size for place in range(ep_size)]
    return tuple(median / sum(medians) for median in medians)
