"""Dispatch and combine by all-to-all, without state between calls: several chunks are in flight at a time.

Same permutations and same message contents as Megatron's all-to-all dispatcher, cut where the wire begins. Where
experts are cut by tensor parallelism, each rank receives its own tokens' rows, and the ranks that hold the parts of the
same experts then gather each other's: every one computes its part for all of them, and the parts' outputs are summed.

Legend of shapes: s positions, b samples, t = s * b tokens of the chunk, n rows sent (one per token and expert), r
rows received, E experts, P ranks of the expert-parallel group, e = E / P local experts, V expert tensor parallel size,
m rows of the local experts (m = r where V = 1), H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute

from megatron_lancet.runtime.comm import Comm, CountsExchange, RowSplits
from megatron_lancet.schedule.ops import Op


@dataclass(frozen=True)
class PermutedChunk:
    """A chunk's rows, one per token and chosen expert, ordered by expert.

    Attributes:
        tokens: [n, H].
        probs: [n], the weight of each row in its token's output.
        row_ids: [n], the token of each row.
        routing_map: [t, E] bool.
        hidden_shape: [s, b, H] of the chunk.
    """

    tokens: torch.Tensor
    probs: torch.Tensor
    row_ids: torch.Tensor
    routing_map: torch.Tensor
    hidden_shape: torch.Size


@dataclass(frozen=True)
class Routes:
    """Who sends how many rows to whom: known once the counts have been exchanged.

    Attributes:
        splits: rows to and from each rank of the expert-parallel group.
        rows_by_source: [V * P, e], rows for each local expert from each rank whose tokens it sees, on the host. All
            that come by way of one rank of the expert-tensor-parallel group are together.
        rows_by_holder: rows r of each rank that holds a part of the same experts, V in all, sums to m.
        rows_per_expert: [e], rows for each local expert.
    """

    splits: RowSplits
    rows_by_source: torch.Tensor
    rows_by_holder: tuple[int, ...]
    rows_per_expert: torch.Tensor


class PendingRoutes:
    """Routes that are known when token counts have arrived."""

    def __init__(self, counts: CountsExchange, routes_of: Callable[[torch.Tensor, torch.Tensor], Routes]) -> None:
        self.counts = counts
        self._routes_of = routes_of
        self._routes: Routes | None = None

    def wait(self) -> Routes:
        """Waits for the counts."""
        if self._routes is None:
            self._routes = self._routes_of(*self.counts.wait())
        return self._routes

    def splits(self) -> RowSplits:
        """Waits for the counts; rows to and from each rank of the expert-parallel group."""
        return self.wait().splits


class AllToAllDispatcher:
    """Moves the rows of chunks between tokens' ranks and experts' ranks."""

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
        self._tp_size = expert_tp_group.size()
        by_source = torch.arange(num_experts * self._tp_size).view(-1, self._num_local_experts)
        self._expert_major = by_source.T.ravel()
        self._source_major = torch.argsort(self._expert_major)
        # Rows of one expert only, or from one rank only, come in both orders at once.
        self._needs_sort = self._num_local_experts > 1 and num_ranks * self._tp_size > 1

    def launch_counts(self, op: Op, routing_map: torch.Tensor) -> PendingRoutes:
        """Tells every rank how many rows each of its experts gets from here.

        Args:
            routing_map: [t, E] bool.
        """
        counts = routing_map.sum(dim=0).long().view(self._num_ranks, 1, self._num_local_experts)
        # All holders of an expert learn of its rows, though one of them receives them from here.
        counts_exchange = self._comm.launch_counts(op, counts.expand(-1, self._tp_size, -1).flatten())
        return PendingRoutes(counts_exchange, self._routes)

    def permute(
        self, hidden: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_rows: int
    ) -> PermutedChunk:
        """Order a chunk's rows by expert; needs no counts.

        Args:
            hidden: [s, b, H].
            probs: [t, E].
            routing_map: [t, E] bool.
            num_rows: true values in ``routing_map``.
        """
        flat = hidden.reshape(-1, hidden.shape[-1])
        tokens, row_probs, row_ids, _, _ = permute(flat, routing_map, probs=probs, num_out_tokens=num_rows)
        assert row_probs is not None
        return PermutedChunk(tokens, row_probs, row_ids, routing_map, hidden.shape)

    def _routes(self, *counts: torch.Tensor) -> Routes:
        """From sent and received counts, both [P * V, e]."""
        sent, received = (side.view(self._num_ranks, self._tp_size, -1).transpose(0, 1) for side in counts)
        rows_VP = received.sum(dim=2)
        return Routes(
            splits=RowSplits(
                sent=tuple(sent[0].sum(dim=1).tolist()), received=tuple(rows_VP[self._tp_group.rank()].tolist())
            ),
            rows_by_source=received.flatten(0, 1),
            rows_by_holder=tuple(rows_VP.sum(dim=1).tolist()),
            rows_per_expert=received.sum(dim=(0, 1)),
        )

    def sort_by_expert(
        self, tokens: torch.Tensor, probs: torch.Tensor, routes: Routes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Received rows [r, H] and their probabilities [r], from rank order to the local experts' [m, H] and [m]."""
        if self._tp_size > 1:
            holders = list(routes.rows_by_holder)
            tokens, probs = (
                gather_from_sequence_parallel_region(rows, group=self._tp_group, output_split_sizes=holders)
                for rows in (tokens, probs)
            )
        if not self._needs_sort:
            return tokens, probs
        sizes = routes.rows_by_source.ravel()
        tokens, sorted_probs = sort_chunks_by_idxs(tokens, sizes, self._expert_major, probs=probs)
        assert sorted_probs is not None
        return tokens, sorted_probs

    def sort_by_peer(self, output: torch.Tensor, routes: Routes, sum_dtype: torch.dtype) -> torch.Tensor:
        """Experts' output rows [m, H], from expert order back to rank order: [r, H].

        Args:
            sum_dtype: of the sum over the parts of an expert.
        """
        if self._needs_sort:
            output, _ = sort_chunks_by_idxs(output, routes.rows_by_source.T.ravel(), self._source_major)
        if self._tp_size == 1:
            return output
        summed = reduce_scatter_to_sequence_parallel_region(
            output.to(sum_dtype), group=self._tp_group, input_split_sizes=list(routes.rows_by_holder)
        )
        return summed.to(output.dtype)

    def unpermute(self, rows: torch.Tensor, chunk: PermutedChunk) -> torch.Tensor:
        """Sum the output rows [n, H] of each token: the chunk's output, [s, b, H]."""
        flat_shape = torch.Size((chunk.routing_map.size(0), chunk.hidden_shape[-1]))
        flat = unpermute(rows, chunk.row_ids, restore_shape=flat_shape, routing_map=chunk.routing_map)
        return flat.view(chunk.hidden_shape)
