"""Rows that the ranks of a group send and receive, by chunk, from measured routing or from shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.profile import ChunkRouting, ModelFacts, Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.schedule.plan import ChunkDim

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
            RecordError: the number of shares is not the number of the group's ranks, or one is out of range.
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


class Pieces(NamedTuple):
    """How the micro-batch is cut at an instruction."""

    dim: ChunkDim = ChunkDim.BATCH
    num_chunks: int = 1
    multiple: int = 1


class Chunk(NamedTuple):
    """One chunk in one layer.

    Attributes:
        cut: how its micro-batch is cut.
        number: which chunk it is, from 0.
        routing: what was recorded of it; None for the shares.
    """

    cut: Pieces
    number: int
    routing: ChunkRouting | None = None


class RowCounts:
    """Rows of chunks by the plain dispatch, of the simulated ranks."""

    def __init__(self, costs: CostModel, loads: Loads) -> None:
        self.costs = costs
        self.loads = loads
        self._shares = [loads.shares[rank] for rank in loads.simulated]
        self._rows_of_token = _rows_of_token(costs.profile)

    def tokens(self, chunk: Chunk) -> int:
        """Tokens of a chunk on each rank."""
        return self.costs.chunk_tokens(*chunk.cut)[chunk.number]

    def received(self, chunk: Chunk) -> list[float]:
        """Rows that the experts of each simulated rank get, its own included."""
        if chunk.routing is not None:
            return list(chunk.routing.received)
        own, num_ranks = self._local_rows(chunk), len(self.loads.shares)
        return [own * share * num_ranks for share in self._shares]

    def kept(self, chunk: Chunk) -> list[float]:
        """Rows that stay on each simulated rank."""
        own = self._local_rows(chunk)
        if chunk.routing is not None:
            return [max(0.0, own - sent) for sent in chunk.routing.sent]
        return [own * share for share in self._shares]

    def sent(self, chunk: Chunk) -> Rows:
        """Rows of the messages. A rank keeps the rows that go from itself to itself."""
        own = self._local_rows(chunk)
        if chunk.routing is not None:
            returned = [got - stays for got, stays in zip(chunk.routing.received, self.kept(chunk), strict=True)]
            return Rows(list(chunk.routing.sent), [max(0, round(number)) for number in returned])
        num_ranks = len(self.loads.shares)
        return Rows(
            [round(own * (1 - share)) for share in self._shares],
            [round(own * share * (num_ranks - 1)) for share in self._shares],
        )

    def _local_rows(self, chunk: Chunk) -> float:
        """Rows of a rank's own tokens. If routing was recorded, the mean over ranks: all have equally many tokens."""
        if chunk.routing is not None:
            return sum(chunk.routing.received) / len(chunk.routing.received)
        return self.tokens(chunk) * self._rows_of_token


def _rows_of_token(profile: Profile) -> float:
    """Mean rows of a token in the recorded chunks: a capacity drops or adds some. Top-k if none are recorded."""
    model, routing = profile.model, profile.routing
    num_tokens = model.micro_batch_size * model.seq_length * model.ep_size * sum(1 / one.num_chunks for one in routing)
    return sum(sum(one.received) for one in routing) / num_tokens if routing else model.topk
