"""Costs of two hops: a row for each *node* that has any of a token's experts, and there one for each such rank.

Legend: P ranks of an expert-parallel group on N nodes, L = P / N of them on each, V ranks that hold the parts of the
same experts, E experts of a layer, k experts of a token, t tokens of a chunk on a rank.

A rank gets the tokens of the ranks with its own place on the other nodes, N t tokens with its own, and passes each of
them to every rank of its node that has any of its experts, V expert-TP ranks each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_lancet.planning.dispatch import DispatchCosts
from megatron_lancet.planning.distinct_rows import expected_part_of_tokens
from megatron_lancet.planning.profile import ChunkRouting, HopRows, ModelFacts, Profile
from megatron_lancet.planning.simulation.rows import Chunk, Rows
from megatron_lancet.schedule.ops import BETWEEN_NODES, OpKind, Verb


class TwoHopCosts(DispatchCosts):
    """Other messages, on other wires, and two ops between them.

    If the profile has no times of these, making the rows of the second hop takes as long for each row as ``preprocess``
    takes for a plain one, and summing what comes back as long as ``postprocess``.
    """

    @staticmethod
    def part_of_bytes(profile: Profile) -> None:
        return None

    def row_bytes(self, kind: OpKind) -> int:
        num_groups = self.model.ep_size
        if kind in BETWEEN_NODES:
            assert self.model.nodes is not None, "the nodes are unknown"
            num_groups = self.model.nodes.num_nodes
        return self.model.row_bytes_to(num_groups)

    def rows(self, verb: Verb, chunk: Chunk) -> Rows:
        """The rows that were recorded, or the expected ones."""
        hops = None if chunk.routing is None else chunk.routing.hops
        if hops is None:
            hops = self._hops.rows(self.counts.tokens(chunk))
        if verb.kind in BETWEEN_NODES:
            return Rows(hops.node_sent, hops.node_received)
        return Rows(hops.local_sent, hops.local_received)

    def rows_per_plain_row(self, kind: OpKind) -> Sequence[float]:
        return [rows / self.model.topk for rows in self._hops.passed_on]

    @cached_property
    def _hops(self) -> "HopParts":
        """Rows of two hops for each token, of the simulated ranks: means over those that each of them represents."""
        loads = self.counts.loads
        return HopParts.of(self.model, loads.shares, self.costs.profile.routing).of_ranks(loads.alike)


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
        """Rows of a chunk of that many tokens."""
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
