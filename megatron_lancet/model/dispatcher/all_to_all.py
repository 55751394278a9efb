"""Dispatch and combine by all-to-all, without state between calls, since several chunks are in flight at a time.

Permutations and message contents equal Megatron's all-to-all dispatcher's, split at the messages. Where
experts are cut by tensor parallelism, each rank receives its own tokens' rows, and the ranks that hold the parts of the
same experts then gather each other's: every one computes its part for all of them, and the parts' outputs are summed.

Legend of shapes: s positions, b samples, t = s * b tokens of the chunk, n rows sent (one per token and expert), r
rows received, E experts, P ranks of the expert-parallel group, e = E / P local experts, V expert tensor parallel size,
m rows of the local experts (m = r where V = 1), H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute

from megatron_lancet.model.dispatcher.base import PlainRows, launch_counts, of_all_parts, sum_parts
from megatron_lancet.model.dispatcher.routes import CountsLimit, PendingRoutes, Routes
from megatron_lancet.model.dispatcher.row_order import by_expert
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.rows.sums import Places
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.ops import Op


@dataclass(frozen=True)
class Permutation:
    """Maps a chunk's rows to its tokens.

    Attributes:
        rows: the token of each row; what Transformer Engine's kernels note instead, where these run.
        routing_map_tE: bool.
        hidden_shape: [s, b, H] of the chunk.
    """

    rows: Places | torch.Tensor
    routing_map_tE: torch.Tensor
    hidden_shape: torch.Size


class AllToAllDispatcher:
    """Moves the rows of chunks between tokens' ranks and experts' ranks."""

    has_plain_rows = True

    def __init__(
        self,
        comm: Comm,
        num_experts: int,
        num_ranks: int,
        expert_tp_group: dist.ProcessGroup,
        fused: bool = False,
        dense: bool = False,
    ) -> None:
        """
        Args:
            num_ranks: P.
            expert_tp_group: the V ranks that hold the parts of the same experts.
            fused: use Transformer Engine's kernels to permute and to sort rows.
            dense: experts' kernels need contiguous rows. Other kernels read sorted rows directly from the message,
                which saves a copy.
        """
        self._comm = comm
        self._fused = fused
        self._dense = dense
        self._num_ranks = num_ranks
        self._num_local_experts = num_experts // num_ranks
        self._tp_group = expert_tp_group
        self.tp_size, self.tp_rank = expert_tp_group.size(), expert_tp_group.rank()
        self._even_routes: dict[int, Routes] = {}
        # For the fused kernels: orders of the parts of received rows, on their device from the first use on.
        parts_by_source = torch.arange(num_experts * self.tp_size).view(-1, self._num_local_experts)
        self._expert_major = {
            last_first: by_expert(parts_by_source, last_first).ravel() for last_first in (False, True)
        }
        self._source_major = {last_first: torch.argsort(order) for last_first, order in self._expert_major.items()}

    def launch_counts(
        self, op: Op, routing_map_tE: torch.Tensor, routed: ReadyEvent, limit: CountsLimit | None = None
    ) -> PendingRoutes[Routes]:
        """Tells every rank how many rows each of its experts gets from here.

        Args:
            routing_map_tE: bool; to be kept until the counts have been waited for, as a :class:`Permutation` does.
            routed: the point in time at which ``routing_map_tE`` was complete.
            limit: see :class:`Dispatcher`.
        """
        peers = self._num_ranks * self.tp_size
        count = partial(self._count, routing_map_tE)
        exchange = launch_counts(self._comm, op, count, routing_map_tE, routed, peers, limit)
        make = partial(Routes.of, tp_size=self.tp_size, tp_rank=self.tp_rank)
        return PendingRoutes(exchange, make, Routes.rows_to, self.tp_size, limit)

    def even_routes(self, rows_per_expert: int, device: torch.device) -> Routes:
        """Returns the routes of a chunk in which every rank sends equally many rows to every expert; sends no counts.

        Args:
            rows_per_expert: rows from one rank for one expert.
            device: device of the rows.
        """
        if rows_per_expert not in self._even_routes:
            shape = self._num_ranks, self._num_local_experts, self.tp_size
            self._even_routes[rows_per_expert] = Routes.even(rows_per_expert, *shape, device)
        return self._even_routes[rows_per_expert]

    def num_rows(
        self, probs_tE: torch.Tensor, topk: int, drops_tokens: bool, routes: PendingRoutes[Routes] | Routes
    ) -> int:
        """The number of rows of a chunk. The host knows it unless tokens are dropped.

        Then it waits for the chunk's own counts. The count of all rows would wait for all that the device has to do.
        """
        return routes.num_sent() if drops_tokens else len(probs_tE) * topk

    def permute(
        self, hidden_sbH: torch.Tensor, probs_tE: torch.Tensor, routing_map_tE: torch.Tensor, num_rows: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], Permutation]:
        """Order a chunk's rows, one per token and chosen expert, by expert; needs no counts.

        Args:
            routing_map_tE: bool.
            num_rows: true values in ``routing_map_tE``.

        Returns:
            Tokens [n, H] and the weight of each row in its token's output, [n]; and how to put them back.
        """
        hidden_tH = hidden_sbH.reshape(-1, hidden_sbH.shape[-1])
        if self._fused:
            tokens_nH, probs_n, row_ids, _, _ = permute(
                hidden_tH, routing_map_tE, probs=probs_tE, num_out_tokens=num_rows, fused=True
            )
            assert probs_n is not None
            return (tokens_nH, probs_n), Permutation(row_ids, routing_map_tE, hidden_sbH.shape)
        expert_n, token_n = torch.nonzero_static(routing_map_tE.t(), size=num_rows).unbind(dim=1)
        rows = Places(token_n, len(hidden_tH))
        probs_n = probs_tE.reshape(-1).index_select(0, token_n * probs_tE.size(1) + expert_n)
        return (rows.copies(hidden_tH), probs_n), Permutation(rows, routing_map_tE, hidden_sbH.shape)

    def expand(self, rows: tuple[torch.Tensor, ...], sent: Sequence[int], rows_per_expert: Sequence[int]) -> PlainRows:
        """The rows as they are; see :class:`Dispatcher`."""
        tokens_nH, probs_n = rows
        return PlainRows(tokens_nH, probs_n, None)

    def _count(self, routing_map_tE: torch.Tensor) -> torch.Tensor:
        """Returns the counts that are sent, [P * V * e]."""
        counts = routing_map_tE.sum(dim=0).view(self._num_ranks, 1, self._num_local_experts)
        # All expert-TP ranks of an expert get its counts, though one of them receives the rows from here.
        return counts.expand(-1, self.tp_size, -1).flatten()

    def collect(
        self, received: tuple[torch.Tensor, ...], routes: Routes, last_expert_first: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Received rows [r, H] and their probabilities [r], from rank order to the local experts' [m, H] and [m]."""
        tokens, probs = received
        if self.tp_size > 1:
            tokens, probs = of_all_parts(received, self._tp_group, routes.rows_by_expert_tp_rank)
        if not self._needs_sort(routes, last_expert_first):
            return (tokens.contiguous(), probs.contiguous()) if self._dense else (tokens, probs)
        if not self._fused:
            order = routes.expert_order(last_expert_first)
            return order.apply(tokens), order.apply(probs)
        parts = self._expert_major[last_expert_first] = self._expert_major[last_expert_first].to(tokens.device)
        tokens_mH, probs_m = sort_chunks_by_idxs(tokens, routes.rows_by_source.ravel(), parts, probs=probs, fused=True)
        assert probs_m is not None
        return tokens_mH, probs_m

    def through_experts(
        self,
        run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        tokens_mH: torch.Tensor,
        probs_m: torch.Tensor,
        routes: Routes,
        last_expert_first: bool = False,
    ) -> torch.Tensor:
        """Runs the experts on rows [m, H], which :meth:`collect` has ordered for them."""
        return run(tokens_mH, probs_m)

    def _needs_sort(self, routes: Routes, last_expert_first: bool) -> bool:
        """Rows of one expert only, or from one rank only, come in both orders at once, with the first expert first."""
        comes_sorted = routes.are_by_expert or self._num_ranks * self.tp_size == 1
        return self._num_local_experts > 1 and (last_expert_first or not comes_sorted)

    def sort_by_peer(
        self, output_mH: torch.Tensor, routes: Routes, sum_dtype: torch.dtype, last_expert_first: bool = False
    ) -> torch.Tensor:
        """Experts' output rows, from expert order back to rank order: [r, H].

        Args:
            sum_dtype: type in which the parts of an expert are summed.
        """
        if self._needs_sort(routes, last_expert_first) and self._fused:
            parts = self._source_major[last_expert_first] = self._source_major[last_expert_first].to(output_mH.device)
            sizes = by_expert(routes.rows_by_source, last_expert_first).ravel()
            output_mH, _ = sort_chunks_by_idxs(output_mH, sizes, parts, fused=True)
        elif self._needs_sort(routes, last_expert_first):
            output_mH = routes.expert_order(last_expert_first).undo(output_mH)
        if self.tp_size == 1:
            return output_mH
        return sum_parts(output_mH, self._tp_group, routes.rows_by_expert_tp_rank, sum_dtype)

    def unpermute(self, rows_nH: torch.Tensor, permutation: Permutation) -> torch.Tensor:
        """Sum the output rows of each token: the chunk's output, [s, b, H]."""
        rows, routing_map_tE = permutation.rows, permutation.routing_map_tE
        if isinstance(rows, Places):
            return rows.sums(rows_nH).view(permutation.hidden_shape)
        shape_tH = torch.Size((routing_map_tE.size(0), permutation.hidden_shape[-1]))
        output_tH = unpermute(rows_nH, rows, restore_shape=shape_tH, routing_map=routing_map_tE, fused=True)
        return output_tH.view(permutation.hidden_shape)
