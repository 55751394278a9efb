"""Costs of deduplicated dispatch: a row for each *rank* that holds any of a token's experts.

Legend: P ranks of an expert-parallel group, E experts of a layer, k experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_lancet.planning.dispatch import DispatchCosts
from megatron_lancet.planning.distinct_rows import expected_part_of_tokens
from megatron_lancet.planning.profile import ChunkRouting, ModelFacts, Profile
from megatron_lancet.planning.simulation.rows import Chunk, Loads, Rows
from megatron_lancet.schedule.ops import OpKind, Verb


class DedupCosts(DispatchCosts):
    """Fewer rows in the plain messages."""

    @staticmethod
    def part_of_bytes(profile: Profile) -> float:
        model = profile.model
        shares = Loads.of(model, profile.received_share).shares
        of_row = model.row_bytes_to(model.ep_size) / model.row_bytes if model.row_bytes else 1.0
        return DistinctParts.of(model, shares, profile.routing).of_all * max(1.0, of_row)

    def row_bytes(self, kind: OpKind) -> int:
        return self.model.row_bytes_to(self.model.ep_size)

    def rows(self, verb: Verb, chunk: Chunk) -> Rows:
        """The rows that were recorded, or the expected part of the plain ones."""
        routing = chunk.routing
        if routing is not None and routing.sent_tokens is not None and routing.received_tokens is not None:
            return Rows(routing.sent_tokens, routing.received_tokens)
        rows = self.counts.sent(chunk)
        sent, returned = (
            [round(number * part) for number, part in zip(of_ranks, parts, strict=True)]
            for of_ranks, parts in ((rows.sent, self._distinct.sent), (rows.returned, self._distinct.returned))
        )
        return Rows(sent, returned)

    @cached_property
    def _distinct(self) -> "DistinctParts":
        """Parts of the rows that remain without duplicates, of the simulated ranks."""
        loads = self.counts.loads
        parts = DistinctParts.of(self.model, loads.shares, self.costs.profile.routing)
        sent, returned = (tuple(its[rank] for rank in loads.simulated) for its in (parts.sent, parts.returned))
        return DistinctParts(sent, returned, parts.of_all)


@dataclass(frozen=True)
class DistinctParts:
    """Distinct rows as parts of the rows that a plain dispatch sends, each between 0 and 1.

    Attributes:
        sent: by rank, for what it sends to others in a dispatch.
        returned: by rank, for what it sends back to others in a combine.
        of_all: for all ranks together.
    """

    sent: tuple[float, ...]
    returned: tuple[float, ...]
    of_all: float

    @staticmethod
    def of(model: ModelFacts, shares: Sequence[float], routing: Sequence[ChunkRouting] = ()) -> "DistinctParts":
        """The parts for a layout in which deduplicated dispatch is possible.

        Args:
            shares: share of the group's routed rows that each rank receives.
            routing: recorded chunks; the parts are scaled so that all together send as many distinct rows as those.
        """
        parts = _expected(model, shares)
        known = [chunk for chunk in routing if chunk.sent_tokens is not None]
        expected = sum(rows * part for chunk in known for rows, part in zip(chunk.sent, parts.sent, strict=True))
        if expected <= 0:
            return parts
        factor = sum(sum(chunk.sent_tokens or ()) for chunk in known) / expected
        return DistinctParts(
            tuple(min(1.0, part * factor) for part in parts.sent),
            tuple(min(1.0, part * factor) for part in parts.returned),
            min(1.0, parts.of_all * factor),
        )


def _expected(model: ModelFacts, shares: Sequence[float]) -> DistinctParts:
    experts, topk = model.num_experts, model.topk
    by_share = {share: expected_part_of_tokens(experts, share * experts, topk) for share in set(shares)}
    total = sum(by_share[share] for share in shares)
    return DistinctParts(
        tuple(_part(total - by_share[share], topk * (1 - share)) for share in shares),
        tuple(_part(by_share[share], topk * share) for share in shares),
        _part(total, topk),
    )


def _part(distinct: float, plain: float) -> float:
    return min(1.0, distinct / plain) if plain > 0 else 1.0
