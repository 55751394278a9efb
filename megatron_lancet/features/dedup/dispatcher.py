"""Dispatch and combine of one row per token and rank, where the plain dispatcher sends one per token and expert.

A row holds the token, its probabilities for the receiving rank's experts, and which of them it has chosen. The receiver
makes one row per chosen expert of it, in stock's order, and sums a token's outputs before they go back; so the experts
and their weight gradients get stock's bits. The backward pass is the mirror: the gradient of a token's output is the
same for all of its experts, so it is sent once, and the gradients of its copies are summed where they were made.
What differs from stock is the order of these sums, and with at most two experts per token not even that.

With recompute, the rows per expert are made again and not kept. (DeepEP, HierMoE and TED remove duplicates likewise.)

Legend of shapes: s positions, b samples, t = s * b tokens of the chunk, E experts, P ranks of the expert-parallel
group, e = E / P local experts, V expert tensor parallel size, d distinct rows sent (one per token and rank that has any
of its experts), q distinct rows that this rank's experts see, m rows of the local experts, H hidden size.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megatron_lancet.model.dispatcher.base import PlainRows, launch_counts, of_all_parts, sum_parts
from megatron_lancet.model.dispatcher.distinct_rows import (
    DistinctRoutes,
    DistinctRows,
    distinct_rows,
    expand,
    num_distinct_rows,
    through_experts,
)
from megatron_lancet.model.dispatcher.routes import CountsLimit, PendingRoutes, Routes
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.ops import Op


class DeduplicatedDispatcher:
    """Moves the distinct rows of chunks between tokens' ranks and experts' ranks; without state between calls."""

    has_plain_rows = False

    def __init__(self, comm: Comm, num_experts: int, num_ranks: int, expert_tp_group: dist.ProcessGroup) -> None:
        """
        Args:
            num_ranks: P.
            expert_tp_group: the V ranks that hold the parts of the same experts.
        """
        self._comm = comm
        self._num_ranks = num_ranks
        self._num_local_experts = num_experts // num_ranks
        self._tp_group = expert_tp_group
        self.tp_size, self.tp_rank = expert_tp_group.size(), expert_tp_group.rank()

    def launch_counts(
        self,
        op: Op,
        routing_map_tE: torch.Tensor,
        routed: ReadyEvent,
        limit: CountsLimit | None = None,
        in_parts: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> PendingRoutes[DistinctRoutes]:
        """Tells every rank how many distinct rows it gets from here, and how many rows each of its experts.

        Args:
            routing_map_tE: bool; to be kept until the counts have been waited for.
            routed: the point in time at which ``routing_map_tE`` was complete.
            limit: see :class:`Dispatcher`.
            in_parts: maps the experts of each token, [t, P, e] bool, to the rows of each part for each expert,
                [P, parts, e], which are also sent; None where all rows go in one message.
        """
        peers = self._num_ranks * self.tp_size
        count = partial(self._count, routing_map_tE, in_parts)
        exchange = launch_counts(self._comm, op, count, routing_map_tE, routed, peers, limit)
        make = partial(
            DistinctRoutes.of,
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
            num_experts=self._num_local_experts,
        )
        return PendingRoutes(exchange, make, DistinctRoutes.rows_to, self.tp_size, limit)

    def _count(
        self, routing_map_tE: torch.Tensor, in_parts: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Returns the counts that are sent, [P * V * (1 + e)], or more: rows of each part, then rows in all."""
        chosen_tPe = routing_map_tE.view(-1, self._num_ranks, self._num_local_experts)
        distinct_P1 = chosen_tPe.any(dim=2).sum(dim=0).unsqueeze(1)
        parts = [] if in_parts is None else [in_parts(chosen_tPe).flatten(1)]
        counts = torch.cat((distinct_P1, *parts, chosen_tPe.sum(dim=0)), dim=1).unsqueeze(1)
        # All expert-TP ranks of an expert get its counts, though one of them receives the rows from here.
        return counts.expand(-1, self.tp_size, -1).flatten()

    def even_routes(self, rows_per_expert: int, device: torch.device) -> Routes:
        """
        Raises:
            AssertionError: always: rows of a padded capacity are all different.
        """
        raise AssertionError("rows of a padded capacity are all different")

    def num_rows(
        self, probs_tE: torch.Tensor, topk: int, drops_tokens: bool, routes: PendingRoutes[DistinctRoutes] | Routes
    ) -> int:
        """The number of rows to make of a chunk; see :func:`num_distinct_rows`."""
        return num_distinct_rows(probs_tE, len(probs_tE) * min(topk, self._num_ranks), routes)

    def permute(
        self, hidden_sbH: torch.Tensor, probs_tE: torch.Tensor, routing_map_tE: torch.Tensor, num_rows: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], DistinctRows]:
        """Make a chunk's distinct rows, ordered by the rank that they go to and there by token.

        Args:
            routing_map_tE: bool.
            num_rows: d, or more; further rows are surplus.

        Returns:
            Tokens [d, H] and, for each, the probabilities of the rank's experts and its choice of them, [d, e + c];
            and how to put them back.
        """
        hidden_tH = hidden_sbH.reshape(-1, hidden_sbH.shape[-1])
        made = distinct_rows(hidden_tH, probs_tE, routing_map_tE, self._num_ranks, num_rows)
        return (made.tokens, made.choice), DistinctRows(made.token_d, routing_map_tE, hidden_sbH.shape)

    def expand(self, rows: tuple[torch.Tensor, ...], sent: Sequence[int], rows_per_expert: Sequence[int]) -> PlainRows:
        """Makes a row for each token and expert of the distinct rows that are sent; see :class:`Dispatcher`."""
        return expand(rows, sent, rows_per_expert)

    def collect(
        self, received: tuple[torch.Tensor, ...], routes: DistinctRoutes, last_expert_first: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Received tokens and their probabilities, with the tokens of the other expert-TP ranks: [q, H], [q, e + c].

        Args:
            last_expert_first: makes no difference; :meth:`through_experts` orders the rows.
        """
        if self.tp_size == 1:
            return received
        return tuple(of_all_parts(received, self._tp_group, routes.rows_by_expert_tp_rank))

    def through_experts(
        self,
        run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        tokens_qH: torch.Tensor,
        probs_q: torch.Tensor,
        routes: DistinctRoutes,
        last_expert_first: bool = False,
    ) -> torch.Tensor:
        """Makes the rows of each expert, runs the experts and sums the outputs of each token: [q, H].

        Args:
            run: maps rows [m, H] and their probabilities [m], ordered by expert, there by source rank and token, to
                outputs [m, H].
            probs_q: probabilities and choice, [q, e + c].
        """
        return through_experts(run, tokens_qH, probs_q, routes.rows_per_expert, last_expert_first)

    def sort_by_peer(
        self,
        output_qH: torch.Tensor,
        routes: DistinctRoutes,
        sum_dtype: torch.dtype,
        last_expert_first: bool = False,
    ) -> torch.Tensor:
        """Sums over the expert-TP ranks; the rows that go back, in rank order.

        Args:
            sum_dtype: type in which the parts of an expert are summed.
            last_expert_first: makes no difference.
        """
        if self.tp_size == 1:
            return output_qH
        return sum_parts(output_qH, self._tp_group, routes.rows_by_expert_tp_rank, sum_dtype)

    def unpermute(self, rows_dH: torch.Tensor, permutation: DistinctRows) -> torch.Tensor:
        """Sum the rows of each token: the chunk's output, [s, b, H]."""
        return permutation.token_d.sums(rows_dH).view(permutation.hidden_shape)
