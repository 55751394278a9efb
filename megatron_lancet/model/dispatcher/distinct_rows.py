"""Rows that stand for a token and a group of experts: made of tokens, expanded to a row per expert, and summed again.

Legend of shapes: t tokens, G groups of experts (of a rank, or of a node), e experts of a group, c = ceil(e / 8)
numbers that hold their choice, d rows (one per token and group that has any of its experts), m rows per expert,
H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from megatron_lancet.model.dispatcher.base import PlainRows
from megatron_lancet.model.dispatcher.routes import PendingRoutes, Routes
from megatron_lancet.runtime.device import on_cuda
from megatron_lancet.runtime.exchange import RowSplits
from megatron_lancet.runtime.rows.sums import Places
from megatron_lancet.runtime.transport.base import TokenCounts

_BITS = 8
"""Choices in one number: every type of probabilities holds integers of this many bits exactly."""


class Rows(NamedTuple):
    """Distinct rows, ordered by the group that they go to and there by token.

    Attributes:
        tokens: [d, H].
        choice: for each, the probabilities of the group's experts and their choice, [d, e + c].
        token_d: the token of each row.
        group_d: the group of each row.
    """

    tokens: torch.Tensor
    choice: torch.Tensor
    token_d: Places
    group_d: torch.Tensor


def num_distinct_rows(probs_tE: torch.Tensor, most_rows: int, routes: PendingRoutes[Any] | Routes) -> int:
    """The number of distinct rows to make of a chunk, which are always counted.

    On CUDA the host does not wait for the counts here, and makes as many rows as there may be: the device would run out
    of work. Surplus rows stay here.

    Args:
        most_rows: the largest number of rows.
    """
    return most_rows if on_cuda(probs_tE) else routes.num_sent()


def distinct_rows(
    tokens_tH: torch.Tensor,
    probs_tE: torch.Tensor,
    chosen_tE: torch.Tensor,
    num_groups: int,
    num_rows: int,
    copies: int = 1,
) -> Rows:
    """Makes a row for each token and group of experts that has any of the token's.

    Args:
        chosen_tE: bool.
        num_groups: G; the experts of a group are neighbours.
        num_rows: d, or more; further rows are surplus.
        copies: number of times that the rows of a group are made, one copy of all after the other.
    """
    num_experts = probs_tE.size(1) // num_groups
    goes_Gt = chosen_tE.view(-1, num_groups, num_experts).any(dim=2).t()
    if copies > 1:
        goes_Gt = goes_Gt.repeat_interleave(copies, dim=0)
    found = torch.nonzero_static(goes_Gt, size=num_rows)
    group_d, token_d = found.clamp(min=0).unbind(dim=1)  # -1 where fewer rows are found
    if copies > 1:
        group_d = group_d // copies
    place_d = token_d * num_groups + group_d
    probs_de, chosen_de = (
        values_tE.reshape(-1, num_experts).index_select(0, place_d) for values_tE in (probs_tE, chosen_tE)
    )
    choice = torch.cat((probs_de, _as_numbers(chosen_de, probs_tE.dtype)), dim=1)
    rows = Places(token_d, len(tokens_tH), found.select(1, 1))
    return Rows(rows.copies(tokens_tH), choice, rows, group_d)


def probs_and_choice(choice_d: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of a group's experts, and the choice of them as bools; [d, e] each.

    Args:
        choice_d: of :class:`Rows`.
        num_experts: e.
    """
    return choice_d[:, :num_experts], _as_bools(choice_d[:, num_experts:], num_experts)


def through_experts(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    tokens_dH: torch.Tensor,
    choice_d: torch.Tensor,
    rows_per_expert: torch.Tensor,
    last_expert_first: bool = False,
    order_d: torch.Tensor | None = None,
) -> torch.Tensor:
    """Makes the rows of each expert, runs the experts and sums the outputs of each row: [d, H].

    Args:
        run: maps rows [m, H] and their probabilities [m], ordered by expert, to outputs [m, H].
        choice_d: of :class:`Rows`, for one group of experts.
        rows_per_expert: [e], on the host.
        order_d: the order for rows of one expert; None for the order of the rows.
    """
    num_rows = sum(rows_per_expert.tolist())
    made = _expand_group(tokens_dH, choice_d, len(rows_per_expert), num_rows, last_expert_first, order_d)
    assert made.place is not None
    return made.place.sums(run(made.tokens, made.probs))


def expand(rows: Sequence[torch.Tensor], groups: Sequence[int], rows_per_expert: Sequence[int]) -> PlainRows:
    """Makes a row for each token and expert of distinct rows of several groups of experts.

    Args:
        rows: tokens and choice of :class:`Rows`.
        groups: rows of each group.
        rows_per_expert: of all groups.
    """
    tokens_dH, choice_d = rows
    num_experts, start, made = len(rows_per_expert) // len(groups), 0, []
    for group, size in enumerate(groups):
        own = slice(start, start + size)
        num_rows = sum(rows_per_expert[group * num_experts : (group + 1) * num_experts])
        part = _expand_group(tokens_dH[own], choice_d[own], num_experts, num_rows)
        assert part.place is not None
        made.append((part.tokens, part.probs, part.place.index_n + start))
        start += size
    tokens, probs, place = (torch.cat(parts) for parts in zip(*made, strict=True))
    return PlainRows(tokens, probs, Places(place, len(tokens_dH)))


def _expand_group(
    tokens_dH: torch.Tensor,
    choice_d: torch.Tensor,
    num_experts: int,
    num_rows: int,
    last_expert_first: bool = False,
    order_d: torch.Tensor | None = None,
) -> PlainRows:
    """The rows of one group of experts; see :func:`through_experts`.

    Args:
        num_experts: e.
        num_rows: m.
    """
    probs_de, chosen_de = probs_and_choice(choice_d, num_experts)
    chosen_ed = (chosen_de if order_d is None else chosen_de.index_select(0, order_d)).t()
    if last_expert_first:
        chosen_ed = chosen_ed.flip(0)
    expert_m, place_m = torch.nonzero_static(chosen_ed, size=num_rows).unbind(dim=1)
    if order_d is not None:
        place_m = order_d.index_select(0, place_m)
    if last_expert_first:
        expert_m = num_experts - 1 - expert_m
    probs_m = probs_de.reshape(-1).index_select(0, place_m * num_experts + expert_m)
    places = Places(place_m, len(tokens_dH))
    return PlainRows(places.copies(tokens_dH), probs_m, places)


def _as_numbers(chosen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Packs bools [d, e] into numbers [d, c], which are sent with the probabilities."""
    return chosen.to(dtype).matmul(_values(chosen.size(1), dtype, chosen.device))


def _as_bools(numbers: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Undoes :func:`_as_numbers`; [d, e]."""
    number_e, place_e = _bits(num_experts, numbers.device)
    found = numbers.detach().to(torch.int32)
    if num_experts > _BITS:
        found = found.index_select(1, number_e)
    return found.bitwise_right_shift(place_e).bitwise_and(1).bool()


@cache
def _bits(num_experts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The number with each expert's bit, [e] int64, and the place of the bit in it, [e] int32."""
    with torch.inference_mode(False):
        expert_e = torch.arange(num_experts, device=device)
        return expert_e // _BITS, (expert_e % _BITS).to(torch.int32)


@cache
def _values(num_experts: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The value of each expert's bit in each number, [e, c]; a product with them is exact in every type."""
    number_e, place_e = _bits(num_experts, device)
    with torch.inference_mode(False):
        value_e = torch.bitwise_left_shift(torch.ones_like(place_e), place_e)
        has_bit_ec = number_e.unsqueeze(1) == torch.arange(-(-num_experts // _BITS), device=device)
        return (value_e.unsqueeze(1) * has_bit_ec).to(dtype)


@dataclass(frozen=True)
class DistinctRows:
    """Maps a chunk's distinct rows to its tokens.

    Attributes:
        token_d: the token of each row.
        routing_map_tE: kept for the kernels that count its rows, see :meth:`DeduplicatedDispatcher.launch_counts`.
        hidden_shape: [s, b, H] of the chunk.
    """

    token_d: Places
    routing_map_tE: torch.Tensor
    hidden_shape: torch.Size


@dataclass(frozen=True)
class DistinctRoutes:
    """Rows of one chunk by rank, one for each token and rank, and by expert.

    Attributes:
        splits: distinct rows to and from each rank of the expert-parallel group.
        rows_by_expert_tp_rank: distinct rows of each rank that holds a part of the same experts, V in all.
        rows_per_expert: [e], rows for each local expert, on the host.
        num_rows: rows per expert that are made of arriving rows, without rows that other expert-TP ranks gather.
    """

    splits: RowSplits
    rows_by_expert_tp_rank: tuple[int, ...]
    rows_per_expert: torch.Tensor
    num_rows: int

    @staticmethod
    def rows_to(counts: Sequence[int]) -> int:
        """Rows of a message, from the counts that its receiver gets."""
        return counts[0]

    @staticmethod
    def of(counts: TokenCounts, tp_size: int, tp_rank: int, num_experts: int) -> "DistinctRoutes":
        """Makes the routes from counts by peer, as :meth:`Routes.of` does.

        Args:
            counts: distinct rows in front, and rows for each expert at the end.
            num_experts: e.
            tp_size: V.
            tp_rank: this rank's place among the V.
        """
        sent, received = ([by_peer[0] for by_peer in peers] for peers in (counts.sent, counts.received))
        per_expert = [sum(of_expert) for of_expert in zip(*counts.received, strict=True)][-num_experts:]
        return DistinctRoutes(
            splits=RowSplits(tuple(sent[::tp_size]), tuple(received[tp_rank::tp_size])),
            rows_by_expert_tp_rank=tuple(sum(received[tp_rank::tp_size]) for tp_rank in range(tp_size)),
            rows_per_expert=torch.tensor(per_expert),
            num_rows=sum(sum(by_peer[-num_experts:]) for by_peer in counts.received[tp_rank::tp_size]),
        )
