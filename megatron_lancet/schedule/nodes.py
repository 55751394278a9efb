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


def nodes_of_group(ep_size: int, expert_tp_size: int, ranks_per_node: int) -> Nodes | str:
    """How expert-parallel groups lie on nodes, or as the end of a sentence why they can't use two hops.

    Megatron numbers the P * V ranks that hold all experts once one after the other, whatever else is parallel.

    Args:
        ep_size: P.
        expert_tp_size: V.
        ranks_per_node: ranks of a node, of all groups.
    """
    size = ep_size * expert_tp_size
    what = f"{size} ranks hold all experts once" if expert_tp_size > 1 else f"an expert-parallel group has {size} ranks"
    if size <= ranks_per_node and ranks_per_node % size == 0:
        return f"{what}, and a node has {ranks_per_node}, so nothing leaves a node"
    if size % ranks_per_node:
        return f"{what}, which do not fill nodes of {ranks_per_node}"
    if ranks_per_node % expert_tp_size:
        return f"the {expert_tp_size} expert-TP ranks of an expert are not on one node of {ranks_per_node} ranks"
    if ranks_per_node == 1:
        return "a node has one rank, so no node gets a token for several of its ranks"
    return Nodes(size // ranks_per_node, ranks_per_node // expert_tp_size)
