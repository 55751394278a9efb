"""Dispatch and combine by all-to-all, without state between calls: several chunks are in flight at a time.

Same permutations and same message contents as Megatron's all-to-all dispatcher, cut where the wire begins.

Legend of shapes: t tokens of the chunk, K experts per token, n = t * K rows sent, m rows received, E experts,
P ranks of the expert-parallel group, e = E / P local experts, H hidden size.
"""

from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute

from megatron_lancet.runtime.all_to_all import Comm, CountsFlight, RowSplits
from megatron_lancet.schedule.ops import Op


@dataclass(frozen=True)
class PermutedChunk:
    """A chunk's rows, one per token and chosen expert, ordered by expert.

    Attributes:
        tokens: [n, H].
        probs: [n], the weight of each row in its token's output.
        row_ids: [n], the token of each row.
        routing_map: [t, E] bool.
        hidden_shape: [S, b, H] of the chunk.
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
        splits: rows to and from each rank.
        rows_by_peer: [P, e], rows received from each rank for each local expert, on the host.
        rows_per_expert: [e], rows for each local expert.
    """

    splits: RowSplits
    rows_by_peer: torch.Tensor
    rows_per_expert: torch.Tensor


class AllToAllDispatcher:
    """Moves the rows of chunks between tokens' ranks and experts' ranks."""

    def __init__(self, comm: Comm, num_experts: int, num_ranks: int) -> None:
        self._comm = comm
        self._num_local_experts = num_experts // num_ranks
        by_peer = torch.arange(num_experts).view(num_ranks, self._num_local_experts)
        self._expert_major = by_peer.T.ravel()
        self._peer_major = torch.argsort(self._expert_major)

    def start_counts(self, op: Op, routing_map: torch.Tensor) -> CountsFlight:
        """Tell every rank how many rows each of its experts gets from here.

        Args:
            routing_map: [t, E] bool.
        """
        return self._comm.start_counts(op, routing_map.sum(dim=0).long())

    def permute(self, hidden: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, topk: int) -> PermutedChunk:
        """Order a chunk's rows by expert; needs no counts.

        Args:
            hidden: [S, b, H].
            probs: [t, E].
            routing_map: [t, E] bool, K true values in every row.
        """
        flat = hidden.reshape(-1, hidden.shape[-1])
        tokens, row_probs, row_ids, _, _ = permute(flat, routing_map, probs=probs, num_out_tokens=flat.size(0) * topk)
        assert row_probs is not None
        return PermutedChunk(tokens, row_probs, row_ids, routing_map, hidden.shape)

    def routes(self, counts: CountsFlight) -> Routes:
        """Wait for the counts."""
        sent_by_peer, received_by_peer = counts.land()
        splits = RowSplits(
            sent=tuple(sent_by_peer.sum(dim=1).tolist()), received=tuple(received_by_peer.sum(dim=1).tolist())
        )
        return Routes(splits, received_by_peer, received_by_peer.sum(dim=0))

    def sort_by_expert(
        self, tokens: torch.Tensor, probs: torch.Tensor, routes: Routes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Received rows [m, H] and their probabilities [m], from rank order to expert order."""
        if self._num_local_experts == 1:
            return tokens, probs
        sizes = routes.rows_by_peer.ravel()
        tokens, sorted_probs = sort_chunks_by_idxs(tokens, sizes, self._expert_major, probs=probs)
        assert sorted_probs is not None
        return tokens, sorted_probs

    def sort_by_peer(self, output: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Experts' output rows [m, H], from expert order back to rank order."""
        if self._num_local_experts == 1:
            return output
        sizes = routes.rows_by_peer.T.ravel()
        return sort_chunks_by_idxs(output, sizes, self._peer_major)[0]

    def unpermute(self, rows: torch.Tensor, chunk: PermutedChunk) -> torch.Tensor:
        """Sum the output rows [n, H] of each token: the chunk's output, [S, b, H]."""
        flat_shape = torch.Size((chunk.routing_map.size(0), chunk.hidden_shape[-1]))
        flat = unpermute(rows, chunk.row_ids, restore_shape=flat_shape, routing_map=chunk.routing_map)
        return flat.view(chunk.hidden_shape)
