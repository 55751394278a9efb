"""Rows that the ranks of a group send and receive, by chunk and tile, from measured routing or from shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron_lancet.files import RecordError
from megatron_lancet.planning.distinct_rows import DistinctParts, HopParts
from megatron_lancet.planning.profile import ChunkRouting, ModelFacts, Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.schedule.ops import BETWEEN_NODES, OpKind
from megatron_lancet.schedule.plan import ChunkDim, Dispatch

_EVEN = 1e-9
_MAX_RANKS_WITH_ROUTING = 8
"""Larger groups are simulated by their shares only, which keeps simulations quick."""


@dataclass(frozen=True)
class Loads:
    """Received rows by rank. Ranks that receive equally many behave alike, so one of them is simulated for all.

    Attributes:
        shares: share of the group's routed rows that each rank receives.
        routing: rows of single chunks, by layer, dimension, chunk count and chunk; without an entry the shares hold.
    """

    shares: tuple[float, ...]
    routing: Mapping[tuple[int, ChunkDim, int, int], ChunkRouting] = field(default_factory=dict)

    @staticmethod
    def of(model: ModelFacts, shares: Sequence[float] | None) -> "Loads":
        """Checks and normalises shares; None for equal ones.

        Raises:
            RecordError: the number of shares is not that of the group's ranks, or one is out of range.
        """
        given = tuple(shares) if shares else (1.0 / model.ep_size,) * model.ep_size
        if len(given) != model.ep_size:
            raise RecordError(f"expected {model.ep_size} shares, one per rank of the group, found {len(given)}")
        total = sum(given)
        if min(given) < 0 or not 0 < total < float("inf"):
            raise RecordError(f"expected shares of at least 0 that sum to 1, found {given}")
        return Loads(tuple(share / total for share in given))

    @staticmethod
    def measured(profile: Profile) -> "Loads":
        """Returns the loads of a profile; chunk by chunk in a small group, of which then every rank is simulated."""
        loads = Loads.of(profile.model, profile.received_share)
        if profile.model.ep_size > _MAX_RANKS_WITH_ROUTING:
            return loads
        return Loads(
            loads.shares,
            {(one.layer, one.chunk_dim, one.num_chunks, one.chunk): one for one in profile.routing},
        )

    @cached_property
    def simulated(self) -> tuple[int, ...]:
        """The simulated ranks: the first of each distinct share."""
        return tuple(ranks[0] for ranks in self.alike)

    @cached_property
    def same_ranks(self) -> tuple[int, ...]:
        """Number of ranks that each simulated one represents, itself included."""
        return tuple(len(ranks) for ranks in self.alike)

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that each simulated one represents."""
        if self.routing:
            return tuple((rank,) for rank in range(len(self.shares)))
        groups: list[list[int]] = []
        for rank, share in enumerate(self.shares):
            same = next((ranks for ranks in groups if abs(share - self.shares[ranks[0]]) <= _EVEN), None)
            if same is None:
                groups.append([rank])
            else:
                same.append(rank)
        return tuple(map(tuple, groups))


class Rows(NamedTuple):
    """Rows of a message of a chunk in a layer, by simulated rank.

    Attributes:
        sent: rows that it sends to others in a dispatch.
        returned: rows that it sends back to others.
    """

    sent: Sequence[int]
    returned: Sequence[int]

    def of_tile(self, tiles: int, tile: int) -> "Rows":
        """The rows of one of the parts in which these are sent, as equal as possible."""
        return Rows(*([_end(number, tile + 1, tiles) - _end(number, tile, tiles) for number in its] for its in self))


def _end(num_rows: int, tile: int, tiles: int) -> int:
    return num_rows * tile // tiles


class Pieces(NamedTuple):
    """How the micro-batch is cut at an instruction."""

    dim: ChunkDim = ChunkDim.BATCH
    num_chunks: int = 1
    multiple: int = 1


class RowCounts:
    """Rows of chunks, of the simulated ranks."""

    def __init__(self, costs: CostModel, loads: Loads) -> None:
        self._costs = costs
        self._model = costs.model
        self._loads = loads
        self._shares = [loads.shares[rank] for rank in loads.simulated]

    def received(self, pieces: Pieces, chunk: int, routing: ChunkRouting | None) -> list[float]:
        """Rows that the experts of each simulated rank get, its own included.

        Args:
            routing: what was recorded of the chunk; None for the shares.
        """
        if routing is not None:
            return list(routing.received)
        own, num_ranks = self._own_rows(pieces, chunk), len(self._loads.shares)
        return [own * share * num_ranks for share in self._shares]

    def kept(self, pieces: Pieces, chunk: int, routing: ChunkRouting | None) -> list[float]:
        """Rows that stay on each simulated rank."""
        own = self._own_rows(pieces, chunk)
        if routing is not None:
            return [own - sent for sent in routing.sent]
        return [own * share for share in self._shares]

    def of_message(
        self, kind: OpKind, pieces: Pieces, chunk: int, routing: ChunkRouting | None, dispatch: Dispatch
    ) -> Rows:
        """Rows of a message of a chunk, in all its tiles."""
        if dispatch is Dispatch.TWO_HOP:
            return self._of_hop(kind, pieces, chunk, routing)
        rows = self._plain(pieces, chunk, routing)
        return self._without_duplicates(rows, routing) if dispatch is Dispatch.DEDUP else rows

    @property
    def passed_on(self) -> Sequence[float]:
        """Rows for each token that a rank makes between two hops."""
        return self._hops.passed_on

    def _own_rows(self, pieces: Pieces, chunk: int) -> int:
        """Rows of a rank's own tokens."""
        return self._costs.chunk_tokens(*pieces)[chunk] * self._model.topk

    def _plain(self, pieces: Pieces, chunk: int, routing: ChunkRouting | None) -> Rows:
        """A rank keeps the rows that go from itself to itself."""
        own = self._own_rows(pieces, chunk)
        if routing is not None:
            kept = [own - sent for sent in routing.sent]
            returned = [received - stays for received, stays in zip(routing.received, kept, strict=True)]
            return Rows(list(routing.sent), returned)
        num_ranks = len(self._loads.shares)
        return Rows(
            [round(own * (1 - share)) for share in self._shares],
            [round(own * share * (num_ranks - 1)) for share in self._shares],
        )

    def _without_duplicates(self, rows: Rows, routing: ChunkRouting | None) -> Rows:
        """The rows of deduplicated messages: those that were recorded, or the expected part of the plain ones."""
        if routing is not None and routing.sent_tokens is not None and routing.received_tokens is not None:
            return Rows(routing.sent_tokens, routing.received_tokens)
        sent, returned = (
            [round(number * part) for number, part in zip(of_ranks, parts, strict=True)]
            for of_ranks, parts in ((rows.sent, self._distinct.sent), (rows.returned, self._distinct.returned))
        )
        return Rows(sent, returned)

    def _of_hop(self, kind: OpKind, pieces: Pieces, chunk: int, routing: ChunkRouting | None) -> Rows:
        """The rows of a message of two hops: those that were recorded, or the expected ones."""
        hops = None if routing is None else routing.hops
        if hops is None:
            hops = self._hops.rows(self._costs.chunk_tokens(*pieces)[chunk])
        if kind in BETWEEN_NODES:
            return Rows(hops.node_sent, hops.node_received)
        return Rows(hops.local_sent, hops.local_received)

    @cached_property
    def _distinct(self) -> DistinctParts:
        """Parts of the rows that remain without duplicates, of the simulated ranks."""
        parts = DistinctParts.of(self._model, self._loads.shares, self._costs.profile.routing)
        ranks = self._loads.simulated
        sent, returned = (tuple(of_ranks[rank] for rank in ranks) for of_ranks in (parts.sent, parts.returned))
        return DistinctParts(sent, returned, parts.of_all)

    @cached_property
    def _hops(self) -> HopParts:
        """Rows of two hops for each token, of the simulated ranks: means over those that each of them represents."""
        return HopParts.of(self._model, self._loads.shares, self._costs.profile.routing).of_ranks(self._loads.alike)
