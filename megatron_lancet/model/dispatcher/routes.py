"""How many rows travel between which ranks; known once the token counts have been exchanged.

Legend of shapes: P ranks of the expert-parallel group, V expert tensor parallel size, e local experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_lancet.runtime.comm import CountsExchange, RowSplits
from megatron_lancet.runtime.transport.base import TokenCounts


@dataclass(frozen=True)
class Routes:
    """Rows of one chunk by rank and by expert.

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


def _by_holder(received: torch.Tensor, tp_size: int) -> torch.Tensor:
    """Orders counts [P * V, e] by rank of the expert-tensor-parallel group first; without one they are in order."""
    if tp_size == 1:
        return received
    return received.view(-1, tp_size, received.size(1)).transpose(0, 1).flatten(0, 1)


class PendingRoutes:
    """Routes that are known when token counts have arrived."""

    def __init__(self, counts: CountsExchange, routes_of: Callable[[TokenCounts], Routes]) -> None:
        self.counts = counts
        self._routes_of = routes_of
        self._routes: Routes | None = None

    def wait(self) -> Routes:
        """Waits for the counts."""
        if self._routes is None:
            self._routes = self._routes_of(self.counts.wait())
        return self._routes

    def splits(self) -> RowSplits:
        """Waits for the counts; rows to and from each rank of the expert-parallel group."""
        return self.wait().splits
