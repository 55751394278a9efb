"""How many rows travel between which ranks; known once the token counts have been exchanged, or in advance.

Legend of shapes: P ranks of the expert-parallel group, V expert tensor parallel size, e local experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from megatron_lancet.model.dispatcher.row_order import RowOrder
from megatron_lancet.runtime.comm import CountsExchange, RowSplits
from megatron_lancet.runtime.transport.base import TokenCounts


@dataclass(frozen=True)
class Routes:
    """Rows of one chunk by rank and by expert. What is made of them on a device is made once, when it is asked for.

    Attributes:
        splits: rows to and from each rank of the expert-parallel group.
        rows_by_source: [V * P, e], rows for each local expert from each rank whose tokens it sees, on the device of the
            rows. All that come by way of one rank of the expert-tensor-parallel group are together.
        rows_by_holder: rows r of each rank that holds a part of the same experts, V in all, sums to m.
        rows_per_expert: [e], rows for each local expert, on the host.
    """

    splits: RowSplits
    rows_by_source: torch.Tensor
    rows_by_holder: tuple[int, ...]
    rows_per_expert: torch.Tensor
    _orders: dict[bool, RowOrder] = field(default_factory=dict)

    def expert_order(self, last_expert_first: bool = False) -> RowOrder:
        """From the order of the sources to that of the local experts; m rows."""
        if last_expert_first not in self._orders:
            num_rows = sum(self.rows_by_holder)
            self._orders[last_expert_first] = RowOrder.by_expert(self.rows_by_source, num_rows, last_expert_first)
        return self._orders[last_expert_first]

    @property
    def num_rows(self) -> int:
        """Rows per expert that arrive here, without what other holders gather: r."""
        return sum(self.splits.received)

    @staticmethod
    def rows_to(counts: Sequence[int]) -> int:
        """Rows of a message, from the counts that its receiver is told."""
        return sum(counts)

    @staticmethod
    def of(counts: TokenCounts, tp_size: int, tp_rank: int) -> "Routes":
        """Makes the routes from counts by peer, of V * P ranks: the V ranks that hold the same experts are neighbours.

        Args:
            tp_size: V.
            tp_rank: this rank's place among the V.
        """
        received_rows = [sum(by_expert) for by_expert in counts.received]
        return Routes(
            # The V ranks get the same counts, and only the first of them the rows.
            splits=RowSplits(
                sent=tuple(sum(by_expert) for by_expert in counts.sent[::tp_size]),
                received=tuple(received_rows[tp_rank::tp_size]),
            ),
            rows_by_source=_by_holder(counts.received_on_device, tp_size),
            rows_by_holder=tuple(sum(received_rows[holder::tp_size]) for holder in range(tp_size)),
            rows_per_expert=torch.tensor([sum(of_expert) for of_expert in zip(*counts.received, strict=True)]),
        )

    @staticmethod
    def even(rows_per_expert: int, num_ranks: int, num_experts: int, tp_size: int, device: torch.device) -> "Routes":
        """Makes the routes by which every rank sends equally many rows to every expert.

        Args:
            rows_per_expert: rows from one rank for one expert.
            num_ranks: P.
            num_experts: local experts, e.
            tp_size: V.
        """
        rows = (num_experts * rows_per_expert,) * num_ranks
        return Routes(
            splits=RowSplits(sent=rows, received=rows),
            rows_by_source=torch.full((tp_size * num_ranks, num_experts), rows_per_expert, device=device),
            rows_by_holder=(sum(rows),) * tp_size,
            rows_per_expert=torch.full((num_experts,), tp_size * num_ranks * rows_per_expert),
        )

    def wait(self) -> "Routes":
        """Returns itself, as :meth:`PendingRoutes.wait` does with its routes."""
        return self


def _by_holder(received: torch.Tensor, tp_size: int) -> torch.Tensor:
    """Orders counts [P * V, e] by rank of the expert-tensor-parallel group first; without one they are in order."""
    if tp_size == 1:
        return received
    return received.view(-1, tp_size, received.size(1)).transpose(0, 1).flatten(0, 1)


@dataclass(frozen=True)
class DistinctRoutes:
    """Rows of one chunk by rank, one for each token and rank, and by expert.

    Attributes:
        splits: distinct rows to and from each rank of the expert-parallel group.
        rows_by_holder: distinct rows of each rank that holds a part of the same experts, V in all.
        rows_per_expert: [e], rows for each local expert, on the host.
        num_rows: rows per expert that are made of what arrives here, without what other holders gather.
    """

    splits: RowSplits
    rows_by_holder: tuple[int, ...]
    rows_per_expert: torch.Tensor
    num_rows: int

    @staticmethod
    def rows_to(counts: Sequence[int]) -> int:
        """Rows of a message, from the counts that its receiver is told."""
        return counts[0]

    @staticmethod
    def of(counts: TokenCounts, tp_size: int, tp_rank: int) -> "DistinctRoutes":
        """Makes the routes from counts by peer, as :meth:`Routes.of` does.

        Args:
            counts: distinct rows in front of the rows for each expert.
            tp_size: V.
            tp_rank: this rank's place among the V.
        """
        sent, received = ([by_peer[0] for by_peer in peers] for peers in (counts.sent, counts.received))
        per_expert = [sum(of_expert) for of_expert in zip(*counts.received, strict=True)][1:]
        return DistinctRoutes(
            splits=RowSplits(tuple(sent[::tp_size]), tuple(received[tp_rank::tp_size])),
            rows_by_holder=tuple(sum(received[holder::tp_size]) for holder in range(tp_size)),
            rows_per_expert=torch.tensor(per_expert),
            num_rows=sum(sum(by_peer[1:]) for by_peer in counts.received[tp_rank::tp_size]),
        )


class PendingRoutes[R: Routes | DistinctRoutes]:
    """Routes that are known when token counts have arrived."""

    def __init__(self, counts: CountsExchange, kind: type[R], tp_size: int, tp_rank: int) -> None:
        """
        Args:
            kind: what the counts are made into.
            tp_size: V.
            tp_rank: this rank's place among the V.
        """
        self.counts = counts
        self._kind = kind
        self._tp_size, self._tp_rank = tp_size, tp_rank
        self._routes: R | None = None

    def num_sent(self) -> int:
        """Waits for this rank's own counts; the rows that it sends, its own included."""
        return sum(map(self._kind.rows_to, self.counts.wait_for_own()[:: self._tp_size]))

    def wait(self) -> R:
        """Waits for the counts."""
        if self._routes is None:
            self._routes = cast("R", self._kind.of(self.counts.wait(), self._tp_size, self._tp_rank))
        return self._routes

    def splits(self) -> RowSplits:
        """Waits for the counts; rows to and from each rank of the expert-parallel group."""
        return self.wait().splits
