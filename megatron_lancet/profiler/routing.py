"""Measures the routing of rows: by layer and chunk, and its imbalance over the ranks of a group."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_lancet.planning.measured.op_times import op_key
from megatron_lancet.planning.measured.pace import MAX_RANKS
from megatron_lancet.planning.profile import ChunkRouting, HopRows, ModelFacts
from megatron_lancet.runtime.trace import RoutedRows, StepTrace
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.plan import ChunkDim, Plan


class ChunkKey(NamedTuple):
    """A chunk of a layer; see :class:`ChunkRouting`."""

    layer: int
    chunk_dim: ChunkDim
    num_chunks: int
    chunk: int


Rows = Mapping[ChunkKey, RoutedRows]
"""Destinations of the tokens of each chunk of a rank."""


class RankRouting(NamedTuple):
    """Routing measured on one rank.

    Attributes:
        group: identifier of its expert-parallel group.
        place: its rank in the group.
        received: rows that its experts received in all traced steps, by layer.
        rows: rows of one micro-batch.
        holders: identifier of the groups whose ranks hold the parts of the same experts; without expert tensor
            parallelism of this group alone.
    """

    group: int
    place: int
    received: Mapping[int, int]
    rows: Rows
    holders: int


def rows_of_step(step: StepTrace, plan: Plan, model: ModelFacts) -> Rows:
    """Returns the rows of the first micro-batch of a step that ran under ``plan``, with any dispatch.

    In a large group only the rows of unchunked micro-batches: each rank has a number for each other one, and the
    simulator does not distinguish the chunks of such a group.
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


def chunk_routing(ranks: Sequence[RankRouting], ep_size: int, nodes: Nodes | None = None) -> tuple[ChunkRouting, ...]:
    """Returns the routing of each layer and chunk in the first group that has the layer.

    The result is empty in a mocked world, where only one of the ranks exists, and for a single rank.

    Args:
        nodes: how a group lies on nodes; None where that is unknown.
    """
    by_key: defaultdict[tuple[int, int, ChunkKey], dict[int, RoutedRows]] = defaultdict(dict)
    groups: defaultdict[int, set[int]] = defaultdict(set)
    for rank in ranks:
        groups[rank.holders].add(rank.group)
        for key, rows in rank.rows.items():
            by_key[rank.holders, rank.group, key][rank.place] = rows
    found: dict[ChunkKey, ChunkRouting] = {}
    for (holders, _, key), rows_of in sorted(by_key.items()):
        if ep_size > 1 and set(rows_of) == set(range(ep_size)) and key not in found:
            of_ranks = [rows_of[place] for place in range(ep_size)]
            rows_to, tokens_to = [its.rows for its in of_ranks], [its.tokens for its in of_ranks]
            by_expert_tp_rank = [by_key[holders, group, key] for group in sorted(groups[holders])]
            found[key] = ChunkRouting(
                *key,
                sent=_to_others(rows_to),
                received=tuple(map(sum, zip(*rows_to, strict=True))),
                sent_tokens=_to_others(tokens_to),
                received_tokens=_to_others(list(zip(*tokens_to, strict=True))),
                hops=None if nodes is None else hop_rows(by_expert_tp_rank, nodes),
            )
    return tuple(found[key] for key in sorted(found))


def hop_rows(by_expert_tp_rank: Sequence[Mapping[int, RoutedRows]], nodes: Nodes) -> HopRows:
    """Returns the rows of one chunk in two hops.

    A token goes once to each node, to the rank with its own rank's place there. That rank passes it on once to each
    rank of the node that has any of its experts, and to every expert-TP rank of these.

    Args:
        by_expert_tp_rank: rows by place, of each group whose ranks hold parts of the same experts; the first one's are
            meant.
    """
    per_node = nodes.ranks_per_node
    own = by_expert_tp_rank[0]
    ranks = [divmod(rank, per_node) for rank in range(len(own))]
    to_node = [own[rank].node_tokens for rank in range(len(own))]

    def passed_on(group: Mapping[int, RoutedRows], node: int, via: int, to: int) -> int:
        """Rows from the rank at place ``via`` of a node to the one at place ``to``."""
        return sum(group[other * per_node + via].tokens[node * per_node + to] for other in range(nodes.num_nodes))

    def kept(node: int, place: int) -> int:
        return passed_on(own, node, place, place)

    places = range(per_node)
    return HopRows(
        node_sent=tuple(sum(to_node[rank]) - to_node[rank][node] for rank, (node, _) in enumerate(ranks)),
        node_received=tuple(
            sum(to_node[other * per_node + place][node] for other in range(nodes.num_nodes) if other != node)
            for node, place in ranks
        ),
        local_sent=tuple(
            len(by_expert_tp_rank) * sum(passed_on(own, node, place, to) for to in places) - kept(node, place)
            for node, place in ranks
        ),
        local_received=tuple(
            sum(passed_on(group, node, via, place) for group in by_expert_tp_rank for via in places) - kept(node, place)
            for node, place in ranks
        ),
    )


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
