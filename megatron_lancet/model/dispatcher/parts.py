"""Cuts the rows of a chunk into parts: those that stay on their rank, and tiles of those that go to other ranks.

The rows for another rank are cut evenly, whatever their experts are: a part of them are neighbours in their order,
which is by expert. Sender and receiver make the same parts of the counts that both know, so nothing more is said.

Legend of shapes: P ranks of the expert-parallel group, V expert tensor parallel size, Q = P * V ranks that exchange
counts, e local experts, T tiles, O parts of the rows that stay.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from megatron_lancet.model.dispatcher.routes import PendingRoutes, Routes
from megatron_lancet.runtime.comm import CountsExchange, RowSplits
from megatron_lancet.runtime.placement import on_cuda
from megatron_lancet.runtime.transport.base import TokenCounts
from megatron_lancet.schedule.plan import OwnRows, Segment


@dataclass(frozen=True)
class Tiling:
    """Into which parts the rows of a chunk are cut. The parts are numbered: those that stay first, then the tiles.

    Attributes:
        num_tiles: T.
        num_own: O.
    """

    num_tiles: int
    num_own: int

    @staticmethod
    def of(segment: Segment) -> "Tiling | None":
        """The parts of a segment's chunks; None where all rows go in one message."""
        if not segment.tiles:
            return None
        return Tiling(segment.tiles, 2 if segment.own_rows is OwnRows.HALF else 1)

    @property
    def num_parts(self) -> int:
        """All parts."""
        return self.num_own + self.num_tiles

    def part_of_tile(self, tile: int) -> int:
        """The number of a tile among the parts."""
        return self.num_own + tile

    def cuts(self, is_own: bool) -> int:
        """The number of parts in which the rows for a rank are."""
        return self.num_own if is_own else self.num_tiles


def part_sizes(num_rows: int, number: int) -> list[int]:
    """Sizes of ``number`` parts of rows, as equal as possible."""
    ends = [num_rows * index // number for index in range(number + 1)]
    return [end - start for start, end in pairwise(ends)]


def rows_of_parts(rows_Qe: torch.Tensor, number: int) -> torch.Tensor:
    """Cuts the rows of each pair of ranks, which are ordered by expert, into parts: rows by expert, [number, Q, e].

    Args:
        rows_Qe: rows of each pair for each expert.
        number: number of parts.
    """
    ends = rows_Qe.cumsum(1)
    cuts = ends[:, -1:] * torch.arange(number + 1).view(-1, 1, 1) // number
    before = torch.minimum(ends, cuts)
    return before.diff(dim=2, prepend=before.new_zeros(number + 1, len(rows_Qe), 1)).diff(dim=0)


class PartedRoutes:
    """Routes of the parts of a chunk by the plain dispatcher; what is received is known when the counts have arrived.

    The number of rows that stay on a rank, and of those that it sends, is known before those of other ranks are.
    """

    def __init__(
        self,
        routes: PendingRoutes[Routes] | Routes,
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
            tp_rank: its place among the V.
            like: a tensor on the device of the rows.
        """
        self.tiling = tiling
        self.own_rank = own_rank
        self._routes = routes
        self._tp_size, self._tp_rank = tp_size, tp_rank
        self._like = like.new_empty(0)
        self._made: dict[int, Routes] = {}

    @cached_property
    def sent(self) -> list[list[int]]:
        """Waits for this rank's own counts; its rows to each rank, its own included, in parts: [P][T], or [O]."""
        return [
            part_sizes(num_rows, self.tiling.cuts(rank == self.own_rank))
            for rank, num_rows in enumerate(self._routes.sent())
        ]

    def sent_in(self, tile: int) -> tuple[int, ...]:
        """Rows of a tile to each rank; none to this one."""
        return tuple(0 if rank == self.own_rank else parts[tile] for rank, parts in enumerate(self.sent))

    def splits(self, tile: int) -> "RowSplits | TileSplits":
        """Rows of a tile to and from each rank."""
        return TileSplits(self, tile) if isinstance(self._routes, PendingRoutes) else self.known_splits(tile)

    def known_splits(self, tile: int) -> RowSplits:
        """Waits for the counts; see :meth:`splits`."""
        received = self.received[self.tiling.part_of_tile(tile)].sum(dim=1).tolist()
        return RowSplits(self.sent_in(tile), tuple(received[self._tp_rank :: self._tp_size]))

    @property
    def counts(self) -> CountsExchange:
        """The token counts that determine what is received."""
        assert isinstance(self._routes, PendingRoutes)
        return self._routes.counts

    @cached_property
    def received(self) -> torch.Tensor:
        """Waits for the counts; rows of each part from each rank for each local expert, [O + T, Q, e] on the host."""
        rows_Qe = torch.tensor(self._routes.received())
        is_own = self._is_own(len(rows_Qe))
        own = rows_of_parts(rows_Qe * is_own, self.tiling.num_own)
        return torch.cat((own, rows_of_parts(rows_Qe * ~is_own, self.tiling.num_tiles)))

    @property
    def received_by_source(self) -> torch.Tensor:
        """Waits for the counts; :attr:`received`, in the order in which an expert has the rows of its sources."""
        by_peer = self.received.view(len(self.received), -1, self._tp_size, self.received.size(2))
        return by_peer.transpose(1, 2).flatten(1, 2)

    def routes(self, part: int) -> Routes:
        """Routes of a part. Waits for the counts, but for rows that stay and that no other rank holds experts of."""
        if part not in self._made:
            self._made[part] = self._make(part)
        return self._made[part]

    def _make(self, part: int) -> Routes:
        is_own = part < self.tiling.num_own
        by_peer = self._own_rows(part) if is_own and self._tp_size == 1 else self.received[part]
        # The caching host allocator keeps the pinned memory until the copy is done.
        on_host = torch.tensor(by_peer.tolist(), pin_memory=on_cuda(self._like))
        num_ranks = len(by_peer) // self._tp_size
        sent = (0,) * num_ranks if is_own else self.sent_in(part - self.tiling.num_own)
        counts = TokenCounts(
            [[num_rows] for num_rows in sent for _ in range(self._tp_size)],
            by_peer.tolist(),
            on_host.to(self._like.device, non_blocking=True),
        )
        routes = Routes.of(counts, self._tp_size, self._tp_rank)
        return replace(routes, are_by_expert=int(by_peer.any(dim=1).sum()) <= 1)

    def _own_rows(self, part: int) -> torch.Tensor:
        """The rows of a part that stays, [P, e], from this rank's own counts."""
        sent_Pe = torch.tensor(self._routes.sent_to_experts())
        is_own = self._is_own(len(sent_Pe))
        return rows_of_parts(sent_Pe * is_own, self.tiling.num_own)[part]

    def _is_own(self, num_peers: int) -> torch.Tensor:
        """Whether a rank's tokens are those of this one, [Q, 1]; V ranks that hold the same experts are neighbours."""
        return (torch.arange(num_peers) // self._tp_size == self.own_rank).unsqueeze(1)


@dataclass(frozen=True)
class TileSplits:
    """Splits of a tile, which are known once token counts have arrived."""

    routes: PartedRoutes
    tile: int

    @property
    def counts(self) -> CountsExchange:
        """The token counts that determine the splits."""
        return self.routes.counts

    def splits(self) -> RowSplits:
        """Waits for the counts and returns the splits."""
        return self.routes.known_splits(self.tile)
