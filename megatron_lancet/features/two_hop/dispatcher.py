"""Dispatch and combine in two hops: a token is sent once to a node, and there once to a rank.

The first hop goes to the rank with the sender's own place on each node that has any of the token's experts. That rank
makes the rows for the ranks of its node, which include the node's own tokens, and the second hop sends them. On the
way back a rank sums a token's outputs, the rank that had forwarded the token sums the outputs of its node, and the
token's own rank sums the outputs of the nodes. One exchange of counts has the rows of both hops, so nothing is
waited for between them. The expert-TP ranks of an expert are further destinations of the second hop, in
place of a gather behind it (Parm's fused schedule). The hops are connected by ``runtime/transport/hops.py``.

Experts' inputs are stock's to the bit and in stock's order. Outputs and gradients differ from stock in the order of
sums, and with at most two experts per token not even in that. (HierMoE, DeepEP and HybridEP send likewise.)

Legend of shapes: s positions, b samples, t = s * b tokens of the chunk, E experts, P ranks of the expert-parallel group
on N nodes, L of them on each, e = E / P local experts, V expert tensor parallel size, d rows of the first hop (one per
token and node), p rows that arrive with it and are passed on, q rows that arrive with the second hop, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megatron_lancet.features.two_hop.routes import TwoHopRoutes
from megatron_lancet.model.dispatcher.base import PlainRows, launch_counts
from megatron_lancet.model.dispatcher.distinct_rows import (
    DistinctRows,
    distinct_rows,
    expand,
    num_distinct_rows,
    probs_and_choice,
    through_experts,
)
from megatron_lancet.model.dispatcher.routes import CountsLimit, PendingRoutes, Routes
from megatron_lancet.model.dispatcher.row_order import RowOrder
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.rows.sums import Places
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import Op


@dataclass(frozen=True)
class PassedRows:
    """Maps the rows of the second hop to the rows of the first.

    Attributes:
        sum_over_expert_tp: of each row, the place of the sum over the expert-TP ranks; None without expert tensor
            parallelism.
        row_of_sum: of each of these sums, the row that had arrived.
        sum_dtype: type in which the parts of an expert are summed.
    """

    sum_over_expert_tp: Places | None
    row_of_sum: Places
    sum_dtype: torch.dtype


class TwoHopDispatcher:
    """Moves rows between tokens' ranks and experts' ranks by way of nodes; without state between calls."""

    has_plain_rows = False

    def __init__(
        self, comm: Comm, num_experts: int, num_ranks: int, expert_tp_group: dist.ProcessGroup, nodes: Nodes, rank: int
    ) -> None:
        """
        Args:
            num_ranks: P.
            expert_tp_group: the V ranks that hold the parts of the same experts.
            rank: this rank's place among the P.
        """
        self._comm = comm
        self._nodes = nodes
        self._num_local_experts = num_experts // num_ranks
        self.tp_size, self.tp_rank = expert_tp_group.size(), expert_tp_group.rank()
        self._make_routes = partial(
            TwoHopRoutes.of, tp_size=self.tp_size, tp_rank=self.tp_rank, nodes=nodes, own_rank=rank
        )
        self._place = rank % nodes.ranks_per_node

    def launch_counts(
        self, op: Op, routing_map_tE: torch.Tensor, routed: ReadyEvent, limit: CountsLimit | None = None
    ) -> PendingRoutes[TwoHopRoutes]:
        """Tells every rank how many rows it gets from here, how many it passes on, and how many its experts have.

        Args:
            routing_map_tE: bool; to be kept until the counts have been waited for.
            routed: the point in time at which ``routing_map_tE`` was complete.
            limit: see :class:`Dispatcher`.
        """
        num_ranks = self._nodes.num_nodes * self._nodes.ranks_per_node
        count, peers = partial(self._count, routing_map_tE), num_ranks * self.tp_size
        exchange = launch_counts(self._comm, op, count, routing_map_tE, routed, peers, limit)
        return PendingRoutes(exchange, self._make_routes, TwoHopRoutes.rows_to, self.tp_size, limit)

    def _count(self, routing_map_tE: torch.Tensor) -> torch.Tensor:
        """Returns the counts that are sent, [P * V * (2 + L + e)]; see :meth:`TwoHopRoutes.of`."""
        num_nodes, per_node = self._nodes.num_nodes, self._nodes.ranks_per_node
        chosen_tNLe = routing_map_tE.view(-1, num_nodes, per_node, self._num_local_experts)
        goes_tNL = chosen_tNLe.any(dim=3)
        to_rank_NL = goes_tNL.sum(dim=0)
        to_node_NL = to_rank_NL.new_zeros(num_nodes, per_node)
        to_node_NL[:, self._place] = goes_tNL.any(dim=2).sum(dim=0)
        counts_NLc = torch.cat(
            (
                to_rank_NL.unsqueeze(2),
                to_node_NL.unsqueeze(2),
                to_rank_NL.unsqueeze(1).expand(-1, per_node, -1),
                chosen_tNLe.sum(dim=0),
            ),
            dim=2,
        )
        # All expert-TP ranks of an expert get its counts.
        return counts_NLc.unsqueeze(2).expand(-1, -1, self.tp_size, -1).flatten()

    def even_routes(self, rows_per_expert: int, device: torch.device) -> Routes:
        """
        Raises:
            AssertionError: always: rows of a padded capacity are all different.
        """
        raise AssertionError("rows of a padded capacity are all different")

    def num_rows(
        self, probs_tE: torch.Tensor, topk: int, drops_tokens: bool, routes: PendingRoutes[TwoHopRoutes] | Routes
    ) -> int:
        """The number of rows of the first hop to make of a chunk; see :func:`num_distinct_rows`."""
        return num_distinct_rows(probs_tE, len(probs_tE) * min(topk, self._nodes.num_nodes), routes)

    def permute(
        self, hidden_sbH: torch.Tensor, probs_tE: torch.Tensor, routing_map_tE: torch.Tensor, num_rows: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], DistinctRows]:
        """Make the rows of the first hop, ordered by the node that they go to and there by token.

        Args:
            routing_map_tE: bool.
            num_rows: d, or more; further rows are surplus.

        Returns:
            Tokens [d, H] and, for each, the probabilities of the node's experts and its choice of them; and how to put
            them back.
        """
        hidden_tH = hidden_sbH.reshape(-1, hidden_sbH.shape[-1])
        made = distinct_rows(hidden_tH, probs_tE, routing_map_tE, self._nodes.num_nodes, num_rows)
        return (made.tokens, made.choice), DistinctRows(made.token_d, routing_map_tE, hidden_sbH.shape)

    def pass_on(
        self, received: tuple[torch.Tensor, ...], routes: TwoHopRoutes
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], PassedRows]:
        """Make the rows of the second hop from those that arrived with the first, ordered by rank and there as these.

        Returns:
            Tokens and, for each, the probabilities of the rank's experts and its choice of them; and how to put them
            back.
        """
        tokens_pH, choice_p = received
        per_node, copies = self._nodes.ranks_per_node, self.tp_size
        probs_pE, chosen_pE = probs_and_choice(choice_p, per_node * self._num_local_experts)
        made = distinct_rows(tokens_pH, probs_pE, chosen_pE, per_node, sum(routes.local_splits.sent), copies)
        num_rows = len(tokens_pH)
        if copies == 1:
            return (made.tokens, made.choice), PassedRows(None, made.token_d, choice_p.dtype)
        goes_Lp = chosen_pE.view(num_rows, per_node, self._num_local_experts).any(dim=2).t()
        sums_Lp = goes_Lp.flatten().cumsum(0) - 1
        num_sums = sum(routes.local_splits.sent) // copies
        row_of_sum = torch.nonzero_static(goes_Lp, size=num_sums).select(1, 1)
        sum_over_expert_tp = sums_Lp.index_select(0, made.group_d * num_rows + made.token_d.index_n)
        sums = Places(sum_over_expert_tp, num_sums), Places(row_of_sum, num_rows)
        return (made.tokens, made.choice), PassedRows(*sums, choice_p.dtype)

    def expand(self, rows: tuple[torch.Tensor, ...], sent: Sequence[int], rows_per_expert: Sequence[int]) -> PlainRows:
        """Makes a row for each token and expert of the rows of the first hop; see :class:`Dispatcher`."""
        return expand(rows, sent, rows_per_expert)

    def collect(
        self, received: tuple[torch.Tensor, ...], routes: TwoHopRoutes, last_expert_first: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """The rows of the second hop, unordered; :meth:`through_experts` orders them."""
        return received

    def through_experts(
        self,
        run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        tokens_qH: torch.Tensor,
        probs_q: torch.Tensor,
        routes: TwoHopRoutes,
        last_expert_first: bool = False,
    ) -> torch.Tensor:
        """Makes the rows of each expert, runs the experts and sums the outputs of each row: [q, H].

        Args:
            run: maps rows [m, H] and their probabilities [m], ordered by expert, there by expert-TP rank, source rank
                and token, to outputs [m, H].
            probs_q: probabilities and choice, [q, e + c].
        """
        # By way of a rank come the rows of its place on each node. In stock's order expert-TP ranks, then nodes precede
        # places.
        order = RowOrder.of_parts(routes.rows_by_way, lambda values: values.permute(1, 2, 0), len(tokens_qH))
        return through_experts(run, tokens_qH, probs_q, routes.rows_per_expert, last_expert_first, order.index_m)

    def sort_by_peer(
        self,
        output_qH: torch.Tensor,
        routes: TwoHopRoutes,
        sum_dtype: torch.dtype,
        last_expert_first: bool = False,
    ) -> torch.Tensor:
        """The rows that go back, as they are; :meth:`sum_of_node` sums over the expert-TP ranks."""
        return output_qH

    def sum_of_node(self, rows: torch.Tensor, passed: PassedRows) -> torch.Tensor:
        """Sums this node's partial outputs per forwarded row: [p, H]."""
        if passed.sum_over_expert_tp is not None:
            rows = passed.sum_over_expert_tp.sums(rows.to(passed.sum_dtype)).to(rows.dtype)
        return passed.row_of_sum.sums(rows)

    def unpermute(self, rows_dH: torch.Tensor, permutation: DistinctRows) -> torch.Tensor:
        """Sum the rows of each token over nodes: the chunk's output, [s, b, H]."""
        return permutation.token_d.sums(rows_dH).view(permutation.hidden_shape)
