"""Rows of a chunk in two hops, known once the token counts have been exchanged.

Legend of shapes: P ranks of the expert-parallel group on N nodes, L of them on each, V expert tensor parallel size,
e local experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_lancet.runtime.exchange import RowSplits
from megatron_lancet.runtime.transport.base import TokenCounts
from megatron_lancet.schedule.nodes import Nodes


@dataclass(frozen=True)
class TwoHopRoutes:
    """Rows of one chunk in both hops, see ``runtime/transport/hops.py``, and by expert.

    Attributes:
        splits: rows to and from each node, one for each token and node.
        local_splits: rows to and from each rank of this node, one for each token and rank.
        rows_by_way: [L, V, N], distinct rows that arrive here by way of each rank of this node from each node, on the
            device of the rows.
        rows_per_expert: [e], rows for each local expert, on the host.
        num_rows: rows per expert that are made of what comes from this rank's expert-parallel group.
    """

    splits: RowSplits
    local_splits: RowSplits
    rows_by_way: torch.Tensor
    rows_per_expert: torch.Tensor
    num_rows: int

    @staticmethod
    def rows_to(counts: Sequence[int]) -> int:
        """Rows of the first hop, from the counts that a rank gets: above 0 only for ranks that it reaches."""
        return counts[1]

    @staticmethod
    def of(counts: TokenCounts, tp_size: int, tp_rank: int, nodes: Nodes, own_rank: int) -> "TwoHopRoutes":
        """Makes the routes from counts by peer, as :meth:`Routes.of` does.

        Args:
            counts: for each peer its distinct rows, those for its node that go by way of it, the distinct rows of each
                of the L ranks of its node, and the rows for each of its experts.
            tp_size: V.
            tp_rank: this rank's place among the V.
            own_rank: its place in the expert-parallel group.
        """
        between, _ = nodes.hops_of(own_rank * tp_size + tp_rank, tp_size)
        local = range(nodes.ranks_per_node)
        # By way of this rank: from the ranks with its place on each node, to each rank of this node.
        passed = [sum(counts.received[peer][2 + place] for peer in between) for place in local]
        by_peer = counts.received_on_device[:, 0].view(nodes.num_nodes, nodes.ranks_per_node, tp_size)
        on_host = [received[0] for received in counts.received]
        per_node = nodes.ranks_per_node * tp_size
        first_expert = 2 + nodes.ranks_per_node
        per_expert = [sum(of_expert) for of_expert in zip(*counts.received, strict=True)][first_expert:]
        return TwoHopRoutes(
            splits=RowSplits(
                tuple(counts.sent[peer][1] for peer in between), tuple(counts.received[peer][1] for peer in between)
            ),
            local_splits=RowSplits(
                tuple(number for number in passed for _ in range(tp_size)),
                tuple(sum(on_host[way::per_node]) for way in range(per_node)),
            ),
            rows_by_way=by_peer.permute(1, 2, 0),
            rows_per_expert=torch.tensor(per_expert),
            num_rows=sum(sum(by_peer[first_expert:]) for by_peer in counts.received[tp_rank::tp_size]),
        )
