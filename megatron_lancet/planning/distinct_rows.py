"""How many rows deduplicated dispatch sends, to ranks or in two hops.

Legend: P ranks of an expert-parallel group on N nodes, L = P / N of them on each, V ranks that hold the parts of the
same experts, E experts of a layer, k experts of a token, t tokens of a chunk on a rank.

A plain dispatch sends one row for each expert of a token, a deduplicated one a row for each *rank* that holds any of
them. If every choice of k among E experts is equally likely, a rank with e experts gets no row of a token with the
probability C(E - e, k) / C(E, k), so a token has on average 1 minus that of a row there (hypergeometric distribution),
in place of k e / E. Real routers may choose neighbouring experts more often together, or, limited to groups of experts,
much more often: where a profile has recorded distinct rows, they count.

Two hops send a row for each *node* that has any of a token's experts: the same formula with the experts of the node. A
rank gets those of the ranks with its own place on the other nodes, N t tokens with its own, and passes each of them on
to every rank of its node that has any of its experts, with V holders to each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lancet.planning.profile import ChunkRouting, HopRows, ModelFacts


def expected_part_of_tokens(num_experts: int, experts_on_rank: float, topk: int) -> float:
    """Part of all tokens that have at least one expert on a rank, if all choices of experts are equally likely.

    Args:
        num_experts: E.
        experts_on_rank: e; a fraction stands for a rank whose experts are chosen more or less often than others.
        topk: k.
    """
    none_there = 1.0
    for chosen in range(topk):
        none_there *= max(0.0, 1.0 - experts_on_rank / (num_experts - chosen))
    # Of whole numbers the product is the formula above; between them it must not give more rows than are chosen.
    return min(1.0 - none_there, topk * experts_on_rank / num_experts)


@dataclass(frozen=True)
class DistinctParts:
    """Distinct rows as parts of the rows that a plain dispatch sends, each between 0 and 1.

    Attributes:
        sent: by rank, for what it sends to others in a dispatch.
        returned: by rank, for what it sends back to others in a combine.
        of_all: for all ranks together.
    """

    sent: tuple[float, ...]
    returned: tuple[float, ...]
    of_all: float

    @staticmethod
    def of(model: ModelFacts, shares: Sequence[float], routing: Sequence[ChunkRouting] = ()) -> "DistinctParts":
        """The parts for a layout in which deduplicated dispatch is possible.

        Args:
            shares: share of the group's routed rows that each rank receives.
            routing: recorded chunks; the parts are scaled so that all together send as many distinct rows as those.
        """
        parts = _expected(model, shares)
        known = [chunk for chunk in routing if chunk.sent_tokens is not None]
        expected = sum(rows * part for chunk in known for rows, part in zip(chunk.sent, parts.sent, strict=True))
        if expected <= 0:
            return parts
        factor = sum(sum(chunk.sent_tokens or ()) for chunk in known) / expected
        return DistinctParts(
            tuple(min(1.0, part * factor) for part in parts.sent),
            tuple(min(1.0, part * factor) for part in parts.returned),
            min(1.0, parts.of_all * factor),
        )


def _expected(model: ModelFacts, shares: Sequence[float]) -> DistinctParts:
    experts, topk = model.num_experts, model.topk
    by_share = {share: expected_part_of_tokens(experts, share * experts, topk) for share in set(shares)}
    total = sum(by_share[share] for share in shares)
    return DistinctParts(
        tuple(_part(total - by_share[share], topk * (1 - share)) for share in shares),
        tuple(_part(by_share[share], topk * share) for share in shares),
        _part(total, topk),
    )


def _part(distinct: float, plain: float) -> float:
    return min(1.0, distinct / plain) if plain > 0 else 1.0


@dataclass(frozen=True)
class HopParts:
    """Rows of two hops for each token of a rank, by rank; like the rows of :class:`HopRows`, which are of a chunk.

    Attributes:
        node_sent: to other nodes.
        node_received: from other nodes.
        local_sent: to other ranks of the node.
        local_received: from other ranks of the node.
        passed_on: rows that the rank makes between the hops, with those that it keeps.
    """

    node_sent: tuple[float, ...]
    node_received: tuple[float, ...]
    local_sent: tuple[float, ...]
    local_received: tuple[float, ...]
    passed_on: tuple[float, ...]

    @staticmethod
    def of(model: ModelFacts, shares: Sequence[float], routing: Sequence[ChunkRouting] = ()) -> "HopParts":
        """The parts for a layout in which two hops are possible.

        Args:
            shares: share of the group's routed rows that each rank receives.
            routing: recorded chunks; each hop is scaled so that all ranks together send as many rows as in those.
        """
        parts = _expected_hops(model, shares)
        known = [(chunk.hops, chunk.num_chunks) for chunk in routing if chunk.hops is not None]
        tokens = model.num_rows / model.topk * sum(1 / num_chunks for _, num_chunks in known)
        between = _ratio(sum(sum(hops.node_sent) for hops, _ in known), tokens * sum(parts.node_sent))
        inside = _ratio(sum(sum(hops.local_sent) for hops, _ in known), tokens * sum(parts.local_sent))
        node_sent, node_received = (
            tuple(part * between for part in its) for its in (parts.node_sent, parts.node_received)
        )
        local_sent, local_received, passed_on = (
            tuple(part * inside for part in its) for its in (parts.local_sent, parts.local_received, parts.passed_on)
        )
        return HopParts(node_sent, node_received, local_sent, local_received, passed_on)

    def of_ranks(self, groups: Sequence[Sequence[int]]) -> "HopParts":
        """Means over groups of ranks, by group."""
        return HopParts(
            *(
                tuple(sum(its[rank] for rank in ranks) / len(ranks) for ranks in groups)
                for its in (self.node_sent, self.node_received, self.local_sent, self.local_received, self.passed_on)
            )
        )

    def rows(self, num_tokens: float) -> HopRows:
        """Rows of a chunk of so many tokens."""
        return HopRows(
            *(
                tuple(round(num_tokens * part) for part in its)
                for its in (self.node_sent, self.node_received, self.local_sent, self.local_received)
            )
        )


def _expected_hops(model: ModelFacts, shares: Sequence[float]) -> HopParts:
    assert model.nodes is not None, "two hops need nodes"
    num_nodes, per_node, holders = model.nodes.num_nodes, model.nodes.ranks_per_node, model.expert_tp_size
    nodes = [range(node * per_node, (node + 1) * per_node) for node in range(num_nodes)]
    to_node, to_rank = (
        [expected_part_of_tokens(model.num_experts, share * model.num_experts, model.topk) for share in its]
        for its in ([sum(shares[rank] for rank in ranks) for ranks in nodes], shares)
    )
    node_of = [node for node, ranks in enumerate(nodes) for _ in ranks]
    made = [num_nodes * holders * sum(to_rank[rank] for rank in ranks) for ranks in nodes]
    return HopParts(
        node_sent=tuple(sum(to_node) - to_node[node] for node in node_of),
        node_received=tuple((num_nodes - 1) * to_node[node] for node in node_of),
        local_sent=tuple(made[node] - num_nodes * own for node, own in zip(node_of, to_rank, strict=True)),
        local_received=tuple((per_node * holders - 1) * num_nodes * own for own in to_rank),
        passed_on=tuple(made[node] for node in node_of),
    )


def _ratio(recorded: float, expected: float) -> float:
    return recorded / expected if expected > 0 else 1.0
