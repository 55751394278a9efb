"""Dispatch and combine of one row per token and rank, where the plain dispatcher sends one per token and expert.

A row holds the token, its probabilities for the receiving rank's experts, and which of them it has chosen. The receiver
makes one row per chosen expert of it, in stock's order, and sums a token's outputs before they go back; so the experts
and their weight gradients get stock's bits. The backward pass is the mirror: the gradient of a token's output is the
same for all of its experts, so it travels once, and the gradients of its copies are summed where they were made.
What differs from stock is the order of these sums, and with at most two experts per token not even that.

With recompute, the rows per expert are made again and not kept. (DeepEP, HierMoE and TED remove duplicates likewise.)

Legend of shapes: s positions, b samples, t = s * b tokens of the chunk, E experts, P ranks of the expert-parallel
group, e = E / P local experts, V expert tensor parallel size, d distinct rows sent (one per token and rank that has any
of its experts), q distinct rows that this rank's experts see, m rows of the local experts, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from megatron_lancet.model.dispatcher.routes import DistinctRoutes, PendingRoutes
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.ops import Op

_BITS = 8
"""Choices in one number: every type of probabilities holds integers of so many bits exactly."""


@dataclass(frozen=True)
class DistinctRows:
    """Maps a chunk's distinct rows to its tokens.

    Attributes:
        token_d: the token of each row, and of those that stay here.
        routing_map_tE: kept for the kernels that count its rows, see :meth:`DeduplicatedDispatcher.launch_counts`.
        hidden_shape: [s, b, H] of the chunk.
    """

    token_d: torch.Tensor
    routing_map_tE: torch.Tensor
    hidden_shape: torch.Size


class DeduplicatedDispatcher:
    """Moves the distinct rows of chunks between tokens' ranks and experts' ranks; without state between calls."""

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

    def launch_counts(self, op: Op, routing_map_tE: torch.Tensor, routed: ReadyEvent) -> PendingRoutes[DistinctRoutes]:
        """Tells every rank how many distinct rows it gets from here, and how many rows each of its experts.

        Args:
            routing_map_tE: bool; to be kept until the counts have been waited for.
            routed: the point in time at which ``routing_map_tE`` was complete.
        """
        exchange = self._comm.launch_counts(op, partial(self._count, routing_map_tE), routed)
        return PendingRoutes(exchange, DistinctRoutes, self._tp_size, self._tp_group.rank())

    def _count(self, routing_map_tE: torch.Tensor) -> torch.Tensor:
        """Returns the counts that are sent, [P * V * (1 + e)]."""
        chosen_tPe = routing_map_tE.view(-1, self._num_ranks, self._num_local_experts)
        distinct_P1 = chosen_tPe.any(dim=2).sum(dim=0).unsqueeze(1)
        counts = torch.cat((distinct_P1, chosen_tPe.sum(dim=0)), dim=1).unsqueeze(1)
        # All holders of an expert learn of its rows, though one of them receives them from here.
        return counts.expand(-1, self._tp_size, -1).flatten()

    def most_rows(self, num_tokens: int, topk: int) -> int:
        """The largest number of distinct rows of a chunk.

        Args:
            topk: experts of a token at most.
        """
        return num_tokens * min(topk, self._num_ranks)

    def permute(
        self, hidden_sbH: torch.Tensor, probs_tE: torch.Tensor, routing_map_tE: torch.Tensor, num_rows: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], DistinctRows]:
        """Make a chunk's distinct rows, ordered by the rank that they go to and there by token.

        Args:
            routing_map_tE: bool.
            num_rows: d, or more; further rows are copies of the first token's.

        Returns:
            Tokens [d, H] and, for each, the probabilities of the rank's experts and its choice of them, [d, e + c];
            and how to put them back.
        """
        goes_Pt = routing_map_tE.view(-1, self._num_ranks, self._num_local_experts).any(dim=2).t()
        rank_d, token_d = torch.nonzero_static(goes_Pt, size=num_rows, fill_value=0).unbind(dim=1)
        place_d = token_d * self._num_ranks + rank_d
        probs_de, chosen_de = (
            values_tE.reshape(-1, self._num_local_experts).index_select(0, place_d)
            for values_tE in (probs_tE, routing_map_tE)
        )
        tokens_dH = hidden_sbH.reshape(-1, hidden_sbH.shape[-1]).index_select(0, token_d)
        choice_dc = _as_numbers(chosen_de, probs_tE.dtype)
        rows = DistinctRows(token_d, routing_map_tE, hidden_sbH.shape)
        return (tokens_dH, torch.cat((probs_de, choice_dc), dim=1)), rows

    def collect(
        self, received: tuple[torch.Tensor, ...], routes: DistinctRoutes, last_expert_first: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Received tokens and their probabilities, with those of the other holders of the experts: [q, H], [q, e + c].

        Args:
            last_expert_first: makes no difference; :meth:`through_experts` orders the rows.
        """
        if self._tp_size == 1:
            return received
        holders = list(routes.rows_by_holder)
        return tuple(
            gather_from_sequence_parallel_region(rows, group=self._tp_group, output_split_sizes=holders)
            for rows in received
        )

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
        num_experts = self._num_local_experts
        chosen_eq = _as_bools(probs_q[:, num_experts:], num_experts).t()
        if last_expert_first:
            chosen_eq = chosen_eq.flip(0)
        num_rows = int(routes.rows_per_expert.sum())
        expert_m, place_m = torch.nonzero_static(chosen_eq, size=num_rows).unbind(dim=1)
        if last_expert_first:
            expert_m = num_experts - 1 - expert_m
        probs_m = probs_q[:, :num_experts].reshape(-1).index_select(0, place_m * num_experts + expert_m)
        output_mH = run(tokens_qH.index_select(0, place_m), probs_m)
        return _summed(output_mH, place_m, len(tokens_qH))

    def sort_by_peer(
        self,
        output_qH: torch.Tensor,
        routes: DistinctRoutes,
        sum_dtype: torch.dtype,
        last_expert_first: bool = False,
    ) -> torch.Tensor:
        """Sums over the holders of the experts; the rows that go back, in rank order.

        Args:
            sum_dtype: type in which the parts of an expert are summed.
            last_expert_first: makes no difference.
        """
        if self._tp_size == 1:
            return output_qH
        summed = reduce_scatter_to_sequence_parallel_region(
            output_qH.to(sum_dtype), group=self._tp_group, input_split_sizes=list(routes.rows_by_holder)
        )
        return summed.to(output_qH.dtype)

    def unpermute(self, rows_dH: torch.Tensor, permutation: DistinctRows) -> torch.Tensor:
        """Sum the rows of each token: the chunk's output, [s, b, H]."""
        shape_sbH = permutation.hidden_shape
        return _summed(rows_dH, permutation.token_d[: len(rows_dH)], shape_sbH[:-1].numel()).view(shape_sbH)


class _SummedRows(torch.autograd.Function):
    """Sums rows by their place. With torch's ``index_add`` autograd would keep them until the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, place: torch.Tensor, num_places: int) -> torch.Tensor:
        ctx.save_for_backward(place)
        return rows.new_zeros((num_places, *rows.shape[1:])).index_add_(0, place, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place), None, None


def _summed(rows: torch.Tensor, place: torch.Tensor, num_places: int) -> torch.Tensor:
    """Sums rows [n, H] with the same place, in their order: [num_places, H]."""
    return cast(torch.Tensor, _SummedRows.apply(rows, place, num_places))


def _as_numbers(chosen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Packs bools [d, e] into numbers [d, ceil(e / 8)]: these travel with the probabilities."""
    padded = torch.nn.functional.pad(chosen, (0, -chosen.size(1) % _BITS))
    values = torch.bitwise_left_shift(torch.ones_like(_places(chosen)), _places(chosen))
    # Where no row is sent, a -1 in the shape would be ambiguous.
    return (padded.view(len(chosen), padded.size(1) // _BITS, _BITS) * values).sum(dim=2).to(dtype)


def _as_bools(numbers: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Undoes :func:`_as_numbers`; [q, e]."""
    bits = torch.bitwise_right_shift(numbers.detach().to(torch.int32).unsqueeze(2), _places(numbers)).bitwise_and(1)
    return bits.flatten(1)[:, :num_experts].bool()


def _places(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(_BITS, dtype=torch.int32, device=like.device)
