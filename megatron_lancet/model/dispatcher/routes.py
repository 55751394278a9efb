"""How many rows are sent between which ranks; known once the token counts have been exchanged, or in advance.

Legend of shapes: P ranks of the expert-parallel group, V expert tensor parallel size, e local experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_lancet.model.dispatcher.row_order import RowOrder
from megatron_lancet.runtime.exchange import CountsExchange, RowSplits
from megatron_lancet.runtime.transport.base import TokenCounts


@dataclass(frozen=True)
class Routes:
    """Rows of one chunk by rank and by expert. Device tensors are made once, when first used.

    Attributes:
        splits: rows to and from each rank of the expert-parallel group.
        rows_by_source: [V * P, e], rows for each local expert from each rank whose tokens it sees, on the device of the
            rows. All that come by way of one rank of the expert-tensor-parallel group are together.
        rows_by_expert_tp_rank: rows r of each rank that holds a part of the same experts, V in all, sums to m.
        rows_per_expert: [e], rows for each local expert, on the host.
        by_peer: [P * V][e], rows from each rank for each local expert, as many as for each of that rank's; only of
            routes that are known without token counts.
        are_by_expert: whether the rows come in the order of the experts, since all are from one rank.
    """

    splits: RowSplits
    rows_by_source: torch.Tensor
    rows_by_expert_tp_rank: tuple[int, ...]
    rows_per_expert: torch.Tensor
    by_peer: Sequence[Sequence[int]] = ()
    are_by_expert: bool = False
    _orders: dict[bool, RowOrder] = field(default_factory=dict)

    def expert_order(self, last_expert_first: bool = False) -> RowOrder:
        """From the order of the sources to the order of the local experts; m rows."""
        if last_expert_first not in self._orders:
            num_rows = sum(self.rows_by_expert_tp_rank)
            self._orders[last_expert_first] = RowOrder.by_expert(self.rows_by_source, num_rows, last_expert_first)
        return self._orders[last_expert_first]

    @property
    def num_rows(self) -> int:
        """Rows per expert that arrive here, without rows that other expert-TP ranks gather: r."""
        return sum(self.splits.received)

    @staticmethod
    def rows_to(counts: Sequence[int]) -> int:
        """Rows of a message, from the counts that its receiver gets."""
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
            rows_by_source=by_expert_tp_rank(counts.received_on_device, tp_size),
            rows_by_expert_tp_rank=tuple(sum(received_rows[tp_rank::tp_size]) for tp_rank in range(tp_size)),
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
            rows_by_expert_tp_rank=(sum(rows),) * tp_size,
            rows_per_expert=torch.full((num_experts,), tp_size * num_ranks * rows_per_expert),
            by_peer=[[rows_per_expert] * num_experts] * (tp_size * num_ranks),
        )

    def wait(self) -> "Routes":
        """Returns itself, as :meth:`PendingRoutes.wait` does with its routes."""
        return self

    def to_launch(self) -> RowSplits:
        """The splits of the dispatch."""
        return self.splits

    def num_sent(self) -> int:
        """The rows that this rank sends, its own included."""
        return sum(self.splits.sent)

    def received(self) -> None:
        """None: no counts were exchanged; see :meth:`PendingRoutes.received`."""

    def sent(self) -> Sequence[int]:
        """Rows to each rank, this one included; see :meth:`PendingRoutes.sent`."""
        return self.splits.sent

    def sent_counts(self) -> Sequence[Sequence[int]]:
        """Of routes that are even; see :meth:`PendingRoutes.sent_counts`."""
        return self.by_peer

    def received_counts(self) -> Sequence[Sequence[int]]:
        """Of routes that are even; see :meth:`PendingRoutes.received_counts`."""
        return self.by_peer

    def received_row_counts(self) -> Sequence[int]:
        """Of routes that are even; see :meth:`PendingRoutes.received_row_counts`."""
        return list(map(sum, self.by_peer))


def by_expert_tp_rank(received: torch.Tensor, tp_size: int) -> torch.Tensor:
    """Orders counts [P * V, e] by rank of the expert-tensor-parallel group first; without one they are in order."""
    if tp_size == 1:
        return received
    return received.view(-1, tp_size, received.size(1)).transpose(0, 1).flatten(0, 1)


class KnownRoutes(Protocol):
    """Routes whose token counts have arrived.

    Attributes:
        splits: rows of the first message, to and from each rank that it connects.
        rows_per_expert: [e], rows for each local expert, on the host.
    """

    @property
    def splits(self) -> RowSplits: ...

    @property
    def rows_per_expert(self) -> torch.Tensor: ...

    @property
    def num_rows(self) -> int:
        """Rows per expert that arrive here, without rows that other expert-TP ranks gather."""


class CountsLimit(Protocol):
    """A limit that needs the counts of all ranks, which are sent behind the counts of a dispatch."""

    def with_counts_of_all(
        self, count: Callable[[], torch.Tensor], routing_map_tE: torch.Tensor, num_peers: int
    ) -> torch.Tensor:
        """The counts to send: the result of ``count``, and what the limit adds for each peer."""

    def dispatch_counts(self, counts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Counts of the dispatch alone, out of what was sent to each peer."""

    def look_at(self, counts: TokenCounts) -> TokenCounts:
        """Takes exchanged counts; returns the counts of the dispatch alone."""

    @property
    def is_exceeded(self) -> bool:
        """Whether the chunk is over the limit, so that its rows are not sent in one message."""


class PendingRoutes[R: KnownRoutes]:
    """Routes that are known when token counts have arrived.

    Attributes:
        counts: the exchange of the token counts.
        limit: the chunk's limit; None without one.
    """

    def __init__(
        self,
        counts: CountsExchange,
        make: Callable[[TokenCounts], R],
        rows_to: Callable[[Sequence[int]], int],
        tp_size: int,
        limit: CountsLimit | None = None,
    ) -> None:
        """
        Args:
            make: makes the routes of the counts.
            rows_to: rows of a message, from the counts that its receiver gets.
            tp_size: V.
            limit: a limit that is not known to be kept before all counts are; None without one.
        """
        self.counts = counts
        self._make = make
        self._rows_to = rows_to
        self._tp_size = tp_size
        self.limit = limit
        self._routes: R | None = None
        self._own: list[list[int]] = []
        self._received: list[list[int]] = []

    def num_sent(self) -> int:
        """Waits for this rank's own counts; the rows that it sends, its own included."""
        return sum(self.sent())

    def sent(self) -> Sequence[int]:
        """Waits for this rank's own counts; its rows to each rank, its own included."""
        return [self._rows_to(of_peer) for of_peer in self.sent_counts()[:: self._tp_size]]

    def sent_counts(self) -> Sequence[Sequence[int]]:
        """Waits for this rank's own counts, which it sends to each peer, [P * V][...]: rows by expert, or more."""
        if not self._own:
            self._own = self.counts.wait_for_own()
            if self.limit is not None:
                self._own = self.limit.dispatch_counts(self._own)
        return self._own

    def wait(self) -> R:
        """Waits for the counts."""
        if self._routes is None:
            counts = self.counts.wait()
            if self.limit is not None:
                counts = self.limit.look_at(counts)
            self._received = counts.received
            self._routes = self._make(counts)
        return self._routes

    def received_counts(self) -> Sequence[Sequence[int]]:
        """Waits for the counts of each peer, [P * V][...]: rows by expert, or more."""
        self.wait()
        return self._received

    def received_row_counts(self) -> Sequence[int]:
        """Waits for the counts; rows of a message from each peer, [P * V]."""
        return [self._rows_to(of_peer) for of_peer in self.received_counts()]

    def received(self) -> list[list[int]]:
        """Waits for the counts; rows for each local expert from each peer, [P * V][e]."""
        num_experts = len(self.wait().rows_per_expert)
        return [of_peer[-num_experts:] for of_peer in self._received]  # behind a dispatch's other counts

    def to_launch(self) -> "PendingRoutes[R]":
        """The splits of the dispatch, which are not known yet."""
        return self

    def splits(self) -> RowSplits | None:
        """Waits for the counts; rows of the first message, to and from each rank that it connects.

        Returns:
            None if the chunk is over its limit.
        """
        routes = self.wait()
        return None if self.limit is not None and self.limit.is_exceeded else routes.splits


def cut_evenly(counts_DG: torch.Tensor, number: int) -> torch.Tensor:
    """Cuts the rows for each of D destinations into parts of equal size, to a row: [number, D, G].

    Args:
        counts_DG: rows for each destination, in G groups in the order in which the rows lie.
        number: number of parts.
    """
    ends = counts_DG.cumsum(1)
    cuts = ends[:, -1:] * torch.arange(number + 1).view(-1, 1, 1) // number
    # Rows of each group in front of each cut, up to the end of each group.
    before = torch.minimum(ends, cuts)
    return before.diff(dim=2, prepend=before.new_zeros(number + 1, len(counts_DG), 1)).diff(dim=0)
