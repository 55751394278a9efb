"""How many rows deduplicated dispatch sends.

Legend: P ranks of an expert-parallel group, E experts of a layer, k experts of a token.

A plain dispatch sends one row for each expert of a token, a deduplicated one a row for each *rank* that holds any of
them. If every choice of k among E experts is equally likely, a rank with e experts gets no row of a token with the
probability C(E - e, k) / C(E, k), so a token has on average 1 minus that of a row there (hypergeometric distribution),
in place of k e / E. Real routers may choose neighbouring experts more often together, or, limited to groups of experts,
much more often: where a profile has recorded distinct rows, they count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lancet.planning.profile import ChunkRouting, ModelFacts


def expected_part_of_tokens(num_experts: int, experts_on_rank: float, topk: int) -> float:
    """Part of all tokens that have at least one expert on a rank, if all choices of experts are equally likely.

    Args:
        num_experts: E.
        experts_on_rank: e; a fraction stands for a rank whose experts are chosen more or less often than others.
        topk: k.
    """
    none_there = 1.0
    for chosen in range(topk):
        none_there *= max(0.0, 1.0 - experts_on_rank / (num_experts - chosen))
    # Of whole numbers the product is the formula above; between them it must not give more rows than are chosen.
    return min(1.0 - none_there, topk * experts_on_rank / num_experts)


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
