"""The most rows of a chunk that a rank's experts process at a time, and the exchange of counts with all ranks.

A rank's own counts say what it receives. All ranks need to know whether *any* rank would receive too much, because all
take part in the rounds in which the chunk is then sent. So with a limit each rank sends every other rank all
of its counts.

Legend of shapes: t tokens of the chunk, P ranks of the expert-parallel group, V expert tensor parallel size,
Q = P * V ranks that exchange counts, E experts, c counts that a peer gets for its own use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_lancet.runtime.transport.base import TokenCounts

type Counts = Sequence[Sequence[int]]
"""Rows from each of the Q ranks to each of the E experts; the V ranks that hold the same experts are neighbours."""


def rows_by_rank(counts: Counts, num_ranks: int) -> list[int]:
    """Rows of all experts of each rank, P in all; every expert-TP rank works on all of them.

    Args:
        num_ranks: P.
    """
    by_expert = [sum(of_expert) for of_expert in zip(*counts, strict=True)]
    num_local = len(by_expert) // num_ranks
    return [sum(by_expert[first : first + num_local]) for first in range(0, len(by_expert), num_local)]


def num_rounds(rows: Sequence[int], max_rows: int) -> int:
    """The fewest rounds in which no rank's experts work on more than ``max_rows`` rows at a time.

    Args:
        rows: of each rank, see :func:`rows_by_rank`.
    """
    return max(1, -(-max(rows) // max_rows))


@dataclass(frozen=True)
class OverLimit:
    """A chunk with more rows for a rank's experts than the row limit allows.

    Attributes:
        num_rounds: rounds in which it goes.
        rows: of the experts of each rank, P in all.
        counts: rows from each rank to each expert.
        like: a tensor on the device of the rows.
    """

    num_rounds: int
    rows: Sequence[int]
    counts: Counts
    like: torch.Tensor


@dataclass
class RowLimit:
    """The limit of a chunk.

    Attributes:
        max_rows: rows that a rank's experts may work on at a time.
        num_experts: E.
        num_ranks: P.
        over: what makes the chunk go in several rounds; None before the counts are known, or if it goes in one.
    """

    max_rows: int
    num_experts: int
    num_ranks: int
    over: OverLimit | None = None

    @property
    def is_exceeded(self) -> bool:
        """Whether the chunk goes in several rounds."""
        return self.over is not None

    def with_counts_of_all(
        self, count: Callable[[], torch.Tensor], routing_map_tE: torch.Tensor, num_peers: int
    ) -> torch.Tensor:
        """The counts sent to the peers, [Q * (c + E)]: counts for each alone, and the rows from here to every expert.

        Args:
            count: returns what is for each alone, [Q * c].
            routing_map_tE: bool.
            num_peers: Q.
        """
        rows_QE = routing_map_tE.sum(dim=0).expand(num_peers, -1)
        return torch.cat((count().view(num_peers, -1), rows_QE), dim=1).flatten()

    def apart(self, counts: Counts) -> tuple[list[list[int]], list[list[int]]]:
        """Takes such counts apart, [Q][c] and [Q][E]."""
        first = -self.num_experts
        return [list(of_peer[:first]) for of_peer in counts], [list(of_peer[first:]) for of_peer in counts]

    def split_counts(self, counts: TokenCounts) -> tuple[TokenCounts, list[list[int]]]:
        """Takes exchanged counts apart: what is for this rank alone, and the rows from each rank to every expert."""
        (sent, _), (received, rows_of_all) = self.apart(counts.sent), self.apart(counts.received)
        return TokenCounts(sent, received, counts.received_on_device[:, : -self.num_experts]), rows_of_all

    def dispatch_counts(self, counts: Counts) -> list[list[int]]:
        """The counts that are for each peer alone, [Q][c]."""
        return self.apart(counts)[0]

    def look_at(self, counts: TokenCounts) -> TokenCounts:
        """Decides in how many rounds the chunk goes; returns the counts that are for this rank alone."""
        counts, rows_of_all = self.split_counts(counts)
        rows = rows_by_rank(rows_of_all, self.num_ranks)
        number = num_rounds(rows, self.max_rows)
        if number > 1:
            self.over = OverLimit(number, rows, rows_of_all, counts.received_on_device)
        return counts
