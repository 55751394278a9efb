"""Cuts the rows of a chunk into parts: local tokens, and tiles of rows for other ranks.

The rows for another rank are cut evenly, whatever their experts are: a part of them are neighbours in their order,
which is by expert. Both sides derive the same tiles from the shared counts; no extra message is needed.

Distinct rows are cut in the same way. Only the sender knows the experts of a distinct row, so it also sends per-tile
counts.

Legend of shapes: P ranks of the expert-parallel group, V expert tensor parallel size, Q = P * V ranks that exchange
counts, e local experts, T tiles, O parts of the rows that stay.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from megatron_lancet.features.tiles.order import Tiled
from megatron_lancet.model.dispatcher.base import Dispatcher
from megatron_lancet.model.dispatcher.distinct_rows import DistinctRoutes
from megatron_lancet.model.dispatcher.routes import PendingRoutes, Routes, by_expert_tp_rank, cut_evenly
from megatron_lancet.runtime.device import on_cuda
from megatron_lancet.runtime.exchange import CountsExchange, RowSplits
from megatron_lancet.schedule.dispatch import Dispatch


@dataclass(frozen=True)
class Tiling:
    """Into which parts the rows of a chunk are cut. The parts are numbered: those that stay first, then the tiles.

    Attributes:
        num_tiles: T.
        num_own: O; 0 where the rows that stay are in the tiles, with the rows for other ranks.
    """

    num_tiles: int
    num_own: int

    @staticmethod
    def of(dispatch: Dispatch) -> "Tiling | None":
        """The parts of chunks with a dispatch; None where all rows go in one message."""
        return Tiling(dispatch.tiles, dispatch.num_own_parts) if isinstance(dispatch, Tiled) else None

    @property
    def num_parts(self) -> int:
        """All parts."""
        return self.num_own + self.num_tiles

    def part_of_tile(self, tile: int) -> int:
        """The number of a tile among the parts."""
        return self.num_own + tile

    @property
    def most_cuts(self) -> int:
        """The larger one of T and O."""
        return max(self.num_own, self.num_tiles)

    def cuts(self, is_own: bool) -> int:
        """The number of parts in which the rows for a rank are."""
        return self.num_own if is_own else self.num_tiles


def part_sizes(num_rows: int, number: int) -> list[int]:
    """Sizes of ``number`` parts of rows, as equal as possible."""
    ends = [num_rows * index // number for index in range(number + 1)]
    return [end - start for start, end in pairwise(ends)]


class PartedRoutes[R: Routes | DistinctRoutes](ABC):
    """Routes of the parts of a chunk; what is received is known when the counts have arrived.

    The numbers of local rows and of rows that the rank sends are known before the counts of other ranks arrive.

    Attributes:
        tiling: the parts.
        own_rank: this rank's place among the P; -1, which no rank has, where the rows that stay are in the tiles.
    """

    def __init__(
        self,
        routes: PendingRoutes[R] | Routes,
        tiling: Tiling,
        own_rank: int,
        tp_size: int,
        tp_rank: int,
        like: torch.Tensor,
    ) -> None:
        """
        Args:
            own_rank: this rank's place among the P.
            tp_size: V.
            tp_rank: this rank's place among the V.
            like: a tensor on the device of the rows.
        """
        self.tiling = tiling
        self.own_rank = own_rank if tiling.num_own else -1
        self._routes = routes
        self._tp_size, self._tp_rank = tp_size, tp_rank
        self._like = like.new_empty(0)
        self._made: dict[int, R] = {}

    @cached_property
    def sent(self) -> list[list[int]]:
        """Waits for this rank's own counts; its rows to each rank, its own included, in parts: [P][T], or [O]."""
        return [
            part_sizes(num_rows, self.tiling.cuts(rank == self.own_rank))
            for rank, num_rows in enumerate(self._routes.sent())
        ]

    def sent_in(self, tile: int) -> tuple[int, ...]:
        """Rows of a tile to each rank; none to :attr:`own_rank`."""
        return tuple(0 if rank == self.own_rank else parts[tile] for rank, parts in enumerate(self.sent))

    def splits(self, tile: int) -> "RowSplits | TileSplits":
        """Rows of a tile to and from each rank."""
        return TileSplits(self, tile) if isinstance(self._routes, PendingRoutes) else self.known_splits(tile)

    def known_splits(self, tile: int) -> RowSplits:
        """Waits for the counts; see :meth:`splits`."""
        received = self._received_in(self.tiling.part_of_tile(tile))
        return RowSplits(self.sent_in(tile), tuple(received[self._tp_rank :: self._tp_size]))

    @property
    def counts(self) -> CountsExchange:
        """The token counts that determine what is received."""
        assert isinstance(self._routes, PendingRoutes)
        return self._routes.counts

    @cached_property
    def received(self) -> torch.Tensor:
        """Waits for the counts; rows of each part from each rank for each local expert, [O + T, Q, e] on the host."""
        return self._parts_of(torch.tensor(self._routes.received_counts()))

    @property
    def received_by_source(self) -> torch.Tensor:
        """Waits for the counts; :attr:`received`, in the order in which an expert has the rows of its sources."""
        by_peer = self.received.view(len(self.received), -1, self._tp_size, self.received.size(2))
        return by_peer.transpose(1, 2).flatten(1, 2)

    def routes(self, part: int) -> R:
        """Routes of a part. Waits for the counts, but for rows that stay and that no other rank holds experts of."""
        if part not in self._made:
            is_own = part < self.tiling.num_own
            if is_own and self._tp_size == 1:
                rows_Qe = self._parts_of(torch.tensor(self._routes.sent_counts()))[part]
                received = [parts[part] if rank == self.own_rank else 0 for rank, parts in enumerate(self.sent)]
            else:
                rows_Qe, received = self.received[part], self._received_in(part)
            sent = (0,) * len(self.sent) if is_own else self.sent_in(part - self.tiling.num_own)
            splits = RowSplits(sent, tuple(received[self._tp_rank :: self._tp_size]))
            by_expert_tp_rank = tuple(sum(received[tp_rank :: self._tp_size]) for tp_rank in range(self._tp_size))
            self._made[part] = self._make(rows_Qe, splits, by_expert_tp_rank)
        return self._made[part]

    def _received_in(self, part: int) -> list[int]:
        """Waits for the counts; rows of the messages with a part, from each of the Q ranks."""
        is_own = part < self.tiling.num_own
        index, number = (part, self.tiling.num_own) if is_own else (part - self.tiling.num_own, self.tiling.num_tiles)
        return [
            part_sizes(num_rows, number)[index] if (peer // self._tp_size == self.own_rank) is is_own else 0
            for peer, num_rows in enumerate(self._routes.received_row_counts())
        ]

    def _is_own(self, num_peers: int) -> torch.Tensor:
        """Whether a rank has the tokens of this rank, [Q, 1]; V ranks that hold the same experts are neighbours."""
        return (torch.arange(num_peers) // self._tp_size == self.own_rank).unsqueeze(1)

    def _on_device(self, on_host: torch.Tensor) -> torch.Tensor:
        """Copies to the device of the rows. The caching host allocator keeps the pinned memory until that is done."""
        pinned = torch.tensor(on_host.tolist(), pin_memory=on_cuda(self._like))
        return pinned.to(self._like.device, non_blocking=True)

    @abstractmethod
    def _parts_of(self, counts: torch.Tensor) -> torch.Tensor:
        """Rows of each part for each expert, [O + T, Q, e], from the counts that peers receive or send."""

    @abstractmethod
    def _make(self, rows_Qe: torch.Tensor, splits: RowSplits, rows_by_expert_tp_rank: tuple[int, ...]) -> R:
        """The routes of a part with these rows."""


class PartedPlainRoutes(PartedRoutes[Routes]):
    """By the plain dispatcher: a row for each token and expert, so the parts of each expert's rows are known."""

    def _parts_of(self, counts: torch.Tensor) -> torch.Tensor:
        if not self.tiling.num_own:
            return cut_evenly(counts, self.tiling.num_tiles)
        is_own = self._is_own(len(counts))
        own = cut_evenly(counts * is_own, self.tiling.num_own)
        return torch.cat((own, cut_evenly(counts * ~is_own, self.tiling.num_tiles)))

    def _make(self, rows_Qe: torch.Tensor, splits: RowSplits, rows_by_expert_tp_rank: tuple[int, ...]) -> Routes:
        return Routes(
            splits=splits,
            rows_by_source=by_expert_tp_rank(self._on_device(rows_Qe), self._tp_size),
            rows_by_expert_tp_rank=rows_by_expert_tp_rank,
            rows_per_expert=rows_Qe.sum(dim=0),
            are_by_expert=int(rows_Qe.any(dim=1).sum()) <= 1,
        )


class PartedDistinctRoutes(PartedRoutes[DistinctRoutes]):
    """By the deduplicated dispatcher: the sender also sends the rows of each expert, see :func:`count_parts`."""

    def _parts_of(self, counts: torch.Tensor) -> torch.Tensor:
        in_parts = counts[:, 1:].view(len(counts), self.tiling.most_cuts + 1, -1)[:, :-1].transpose(0, 1)
        is_own = self._is_own(len(counts))
        return torch.cat((in_parts[: self.tiling.num_own] * is_own, in_parts[: self.tiling.num_tiles] * ~is_own))

    def _make(
        self, rows_Qe: torch.Tensor, splits: RowSplits, rows_by_expert_tp_rank: tuple[int, ...]
    ) -> DistinctRoutes:
        num_rows = int(rows_Qe[self._tp_rank :: self._tp_size].sum())
        return DistinctRoutes(splits, rows_by_expert_tp_rank, rows_Qe.sum(dim=0), num_rows)


def count_parts(chosen_tPe: torch.Tensor, tiling: Tiling, own_rank: int) -> torch.Tensor:
    """Counts the rows per expert of each part of the distinct rows for each rank, [P, most cuts, e].

    Args:
        chosen_tPe: bool, the experts of each token.
        own_rank: this rank, whose local tokens are cut differently.
    """
    goes_tP = chosen_tPe.any(dim=2)
    number_P = goes_tP.new_full(goes_tP.shape[1:], tiling.num_tiles, dtype=torch.int64)
    if tiling.num_own:
        number_P[own_rank] = tiling.num_own
    num_rows_P, index_tP = goes_tP.sum(dim=0), goes_tP.cumsum(dim=0) - 1
    ends = [num_rows_P * number_P.clamp(max=end) // number_P for end in range(tiling.most_cuts + 1)]
    in_parts = [
        (chosen_tPe & ((start <= index_tP) & (index_tP < end)).unsqueeze(2)).sum(dim=0) for start, end in pairwise(ends)
    ]
    return torch.stack(in_parts, dim=1)


@dataclass(frozen=True)
class TileSplits:
    """Splits of a tile, which are known once token counts have arrived."""

    routes: PartedRoutes[Any]
    tile: int

    @property
    def counts(self) -> CountsExchange:
        """The token counts that determine the splits."""
        return self.routes.counts

    def splits(self) -> RowSplits:
        """Waits for the counts and returns the splits."""
        return self.routes.known_splits(self.tile)


def parted_routes(
    dispatcher: Dispatcher, routes: PendingRoutes[Any] | Routes, tiling: Tiling, own_rank: int, like: torch.Tensor
) -> PartedRoutes[Any]:
    """The routes of the parts of a chunk.

    Args:
        dispatcher: moves the rows.
        routes: of all its rows; the counts of distinct rows were launched for these parts.
        own_rank: this rank's place in the expert-parallel group.
        like: a tensor on the device of the rows.
    """
    of_rows: type[PartedRoutes[Any]] = PartedPlainRoutes if dispatcher.has_plain_rows else PartedDistinctRoutes
    return of_rows(routes, tiling, own_rank, dispatcher.tp_size, dispatcher.tp_rank, like)
