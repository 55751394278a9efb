"""How the ranks of an expert-parallel group lie on nodes.

Legend: P ranks of an expert-parallel group on N nodes, L = P / N of them on each, V ranks that hold the parts of the
same experts (expert tensor parallel size). The ranks of a node are neighbours, and so are the V ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lancet.schedule.ops import BETWEEN_NODES, INSIDE_NODE, Op


@dataclass(frozen=True)
class Nodes:
    """Node by node, equally many ranks of the group on each.

    Attributes:
        num_nodes: N.
        ranks_per_node: L.
    """

    num_nodes: int
    ranks_per_node: int

    def __str__(self) -> str:
        return f"{self.num_nodes} nodes x {self.ranks_per_node} ranks"

    def hops_of(self, rank: int, expert_tp_size: int = 1) -> tuple[list[int], list[int]]:
        """Places of the ranks of both hops of a rank: the ranks with its place on each node, and the ranks of its node.

        Args:
            rank: place among the P * V ranks that exchange token counts.
            expert_tp_size: V.
        """
        per_node = self.ranks_per_node * expert_tp_size
        node, place = divmod(rank, per_node)
        return (
            [other * per_node + place for other in range(self.num_nodes)],
            [node * per_node + other for other in range(per_node)],
        )

    def num_leaving(self, op: Op, sent: Sequence[int], rank: int, num_to_others: int) -> int:
        """Rows of a message that leave a rank's node.

        Args:
            sent: rows by rank that the message's transport connects.
            rank: place of the sender among the P ranks.
            num_to_others: rows that leave the rank.
        """
        if op.kind in BETWEEN_NODES:
            return num_to_others
        if op.kind in INSIDE_NODE:
            return 0
        first = rank // self.ranks_per_node * self.ranks_per_node
        return sum(sent) - sum(sent[first : first + self.ranks_per_node])
