"""Cuts the rows of a chunk into rounds, so that no rank exceeds its row limit.

All ranks have all counts and derive the same rounds from them; no extra message is needed. The rows of a destination,
in the order of its experts, are cut evenly. So the number of rounds is the smallest, every round of a destination has
the fewest rows that this number allows, and the rows that a sender sends in a round are neighbours among its rows,
which are ordered by expert.

Legend of shapes: P ranks of the expert-parallel group, V expert tensor parallel size, E experts, e = E / P on a rank,
R rounds, n rows that this rank sends.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_lancet.features.row_bound.limit import Counts
from megatron_lancet.model.dispatcher.routes import Routes, cut_evenly
from megatron_lancet.runtime.device import on_cuda
from megatron_lancet.runtime.exchange import RowSplits


def cut_rows(counts: Counts, num_ranks: int, number: int) -> torch.Tensor:
    """The rows of each round, [R, P, e, V, P]: to a rank, for one of its experts, from an expert-TP rank, and rank.

    Args:
        num_ranks: P.
        number: R.
    """
    by_source = torch.tensor(counts)
    num_local = by_source.size(1) // num_ranks
    line = by_source.view(num_ranks, -1, num_ranks, num_local).permute(2, 3, 1, 0)
    return cut_evenly(line.reshape(num_ranks, -1), number).view(number, *line.shape)


@dataclass(frozen=True)
class Round:
    """The part of a chunk's rows that is on its way at a time.

    Attributes:
        sent: places among the rows of this rank, [n], of those that it sends to each rank.
        rows_by_source: [V * P, e] on the host, see :class:`Routes`.
        splits: rows to and from each rank.
        rows_by_expert_tp_rank: see :class:`Routes`.
        like: a tensor on the device of the rows.
    """

    sent: tuple[slice, ...]
    rows_by_source: torch.Tensor
    splits: RowSplits
    rows_by_expert_tp_rank: tuple[int, ...]
    like: torch.Tensor

    @cached_property
    def routes(self) -> Routes:
        """The routes of these rows by the plain dispatcher; made where they are needed first."""
        # The caching host allocator keeps the pinned memory until the copy is done.
        on_host = torch.tensor(self.rows_by_source.tolist(), pin_memory=on_cuda(self.like))
        on_device = on_host.to(self.like.device, non_blocking=True)
        return Routes(self.splits, on_device, self.rows_by_expert_tp_rank, self.rows_by_source.sum(dim=0))

    def picked(self, rows_n: torch.Tensor) -> torch.Tensor:
        """The rows that it sends out of this rank's rows [n, ...], in rank order."""
        return torch.cat([rows_n[part] for part in self.sent])

    def put_back(self, rows: torch.Tensor, rows_n: torch.Tensor) -> None:
        """Writes rows that have come back in rank order to their places among this rank's [n, ...]."""
        for part, own in zip(self.sent, rows.split(self.splits.sent), strict=True):
            rows_n[part].copy_(own)


def rounds_of(
    counts: Counts, num_ranks: int, number: int, own_rank: int, own_place: int, like: torch.Tensor
) -> list[Round]:
    """Makes the rounds of a rank.

    Args:
        num_ranks: P.
        number: R.
        own_rank: its place among the P.
        own_place: its rank in the expert-tensor-parallel group.
        like: a tensor on the device of the rows.
    """
    parts = cut_rows(counts, num_ranks, number)
    sent_RP = parts[:, :, :, own_place, own_rank].sum(dim=2)
    own = parts[:, own_rank]
    start = sent_RP.sum(dim=0).cumsum(0) - sent_RP.sum(dim=0) + (sent_RP.cumsum(0) - sent_RP)
    return [
        Round(
            sent=tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True)),
            rows_by_source=rows_eVP.permute(1, 2, 0).flatten(0, 1),
            splits=RowSplits(tuple(sizes), tuple(rows_eVP[:, own_place].sum(dim=0).tolist())),
            rows_by_expert_tp_rank=tuple(rows_eVP.sum(dim=(0, 2)).tolist()),
            like=like,
        )
        for firsts, sizes, rows_eVP in zip(start.tolist(), sent_RP.tolist(), own, strict=True)
    ]
