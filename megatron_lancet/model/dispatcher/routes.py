"""How many rows travel between which ranks; known once the token counts have been exchanged, or in advance.

Legend of shapes: P ranks of the expert-parallel group on N nodes, L of them on each, V expert tensor parallel size,
e local experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_lancet.model.dispatcher.row_limit import Counts, RowLimit, num_rounds, rows_by_rank
from megatron_lancet.model.dispatcher.row_order import RowOrder
from megatron_lancet.runtime.comm import CountsExchange, RowSplits
from megatron_lancet.runtime.transport.base import TokenCounts
from megatron_lancet.schedule.nodes import Nodes


@dataclass(frozen=True)
class Routes:
    """Rows of one chunk by rank and by expert. What is made of them on a device is made once, when it is asked for.

    Attributes:
        splits: rows to and from each rank of the expert-parallel group.
        rows_by_source: [V * P, e], rows for each local expert from each rank whose tokens it sees, on the device of the
            rows. All that come by way of one rank of the expert-tensor-parallel group are together.
        rows_by_holder: rows r of each rank that holds a part of the same experts, V in all, sums to m.
        rows_per_expert: [e], rows for each local expert, on the host.
        by_peer: [P * V][e], rows from each rank for each local expert, as many as for each of that rank's; only of
            routes that are known without token counts.
        are_by_expert: whether the rows come in the order of the experts, since all are from one rank.
    """

    splits: RowSplits
    rows_by_source: torch.Tensor
    rows_by_holder: tuple[int, ...]
    rows_per_expert: torch.Tensor
    by_peer: Sequence[Sequence[int]] = ()
    are_by_expert: bool = False
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
            rows_by_source=by_holder(counts.received_on_device, tp_size),
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
            by_peer=[[rows_per_expert] * num_experts] * (tp_size * num_ranks),
        )

    def wait(self) -> "Routes":
        """Returns itself, as :meth:`PendingRoutes.wait` does with its routes."""
        return self

    def sent(self) -> Sequence[int]:
        """Rows to each rank, this one included; see :meth:`PendingRoutes.sent`."""
        return self.splits.sent

    def tells(self) -> Sequence[Sequence[int]]:
        """Of routes that are even; see :meth:`PendingRoutes.tells`."""
        return self.by_peer

    def told(self) -> Sequence[Sequence[int]]:
        """Of routes that are even; see :meth:`PendingRoutes.told`."""
        return self.by_peer

    def told_rows(self) -> Sequence[int]:
        """Of routes that are even; see :meth:`PendingRoutes.told_rows`."""
        return list(map(sum, self.by_peer))


def by_holder(received: torch.Tensor, tp_size: int) -> torch.Tensor:
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
    def of(counts: TokenCounts, tp_size: int, tp_rank: int, num_experts: int) -> "DistinctRoutes":
        """Makes the routes from counts by peer, as :meth:`Routes.of` does.

        Args:
            counts: distinct rows in front, and rows for each expert at the end.
            num_experts: e.
            tp_size: V.
            tp_rank: this rank's place among the V.
        """
        sent, received = ([by_peer[0] for by_peer in peers] for peers in (counts.sent, counts.received))
        per_expert = [sum(of_expert) for of_expert in zip(*counts.received, strict=True)][-num_experts:]
        return DistinctRoutes(
            splits=RowSplits(tuple(sent[::tp_size]), tuple(received[tp_rank::tp_size])),
            rows_by_holder=tuple(sum(received[holder::tp_size]) for holder in range(tp_size)),
            rows_per_expert=torch.tensor(per_expert),
            num_rows=sum(sum(by_peer[-num_experts:]) for by_peer in counts.received[tp_rank::tp_size]),
        )


@dataclass(frozen=True)
class TwoHopRoutes:
    """Rows of one chunk in both hops, see ``runtime/transport/hops.py``, and by expert.

    Attributes:
        splits: rows to and from each node, one for each token and node.
        local_splits: rows to and from each rank of this node, one for each token and rank.
        rows_by_way: [L, V, N], distinct rows that arrive here by way of each rank of this node from each node, on the
            device of the rows.
        rows_per_expert: [e], rows for each local expert, on the host.
        num_rows: rows per expert that are made of what comes from this rank's expert-parallel group.
    """

    splits: RowSplits
    local_splits: RowSplits
    rows_by_way: torch.Tensor
    rows_per_expert: torch.Tensor
    num_rows: int

    @staticmethod
    def rows_to(counts: Sequence[int]) -> int:
        """Rows of the first hop, from the counts that a rank is told: above 0 only for ranks that it reaches."""
        return counts[1]

    @staticmethod
    def of(counts: TokenCounts, tp_size: int, tp_rank: int, nodes: Nodes, own_rank: int) -> "TwoHopRoutes":
        """Makes the routes from counts by peer, as :meth:`Routes.of` does.

        Args:
            counts: for each peer its distinct rows, those for its node that go by way of it, the distinct rows of each
                of the L ranks of its node, and the rows for each of its experts.
            tp_size: V.
            tp_rank: this rank's place among the V.
            own_rank: its place in the expert-parallel group.
        """
        between, _ = nodes.hops_of(own_rank * tp_size + tp_rank, tp_size)
        local = range(nodes.ranks_per_node)
        # By way of this rank: from the ranks with its place on each node, to each rank of this node.
        passed = [sum(counts.received[peer][2 + place] for peer in between) for place in local]
        by_peer = counts.received_on_device[:, 0].view(nodes.num_nodes, nodes.ranks_per_node, tp_size)
        on_host = [received[0] for received in counts.received]
        per_node = nodes.ranks_per_node * tp_size
        first_expert = 2 + nodes.ranks_per_node
        per_expert = [sum(of_expert) for of_expert in zip(*counts.received, strict=True)][first_expert:]
        return TwoHopRoutes(
            splits=RowSplits(
                tuple(counts.sent[peer][1] for peer in between), tuple(counts.received[peer][1] for peer in between)
            ),
            local_splits=RowSplits(
                tuple(number for number in passed for _ in range(tp_size)),
                tuple(sum(on_host[way::per_node]) for way in range(per_node)),
            ),
            rows_by_way=by_peer.permute(1, 2, 0),
            rows_per_expert=torch.tensor(per_expert),
            num_rows=sum(sum(by_peer[first_expert:]) for by_peer in counts.received[tp_rank::tp_size]),
        )


@dataclass(frozen=True)
class OverLimit:
    """A chunk of which a rank's experts would get more rows than they may work on at a time.

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


class PendingRoutes[R: Routes | DistinctRoutes | TwoHopRoutes]:
    """Routes that are known when token counts have arrived."""

    def __init__(
        self,
        counts: CountsExchange,
        make: Callable[[TokenCounts], R],
        rows_to: Callable[[Sequence[int]], int],
        tp_size: int,
        num_ranks: int,
        limit: RowLimit | None = None,
    ) -> None:
        """
        Args:
            make: makes the routes of the counts.
            rows_to: rows of a message, from the counts that its receiver is told.
            tp_size: V.
            num_ranks: P.
            limit: how many rows a rank's experts may work on at a time; None for any number.
        """
        self.counts = counts
        self._make = make
        self._rows_to = rows_to
        self._tp_size = tp_size
        self._num_ranks = num_ranks
        self._limit = limit
        self._routes: R | None = None
        self._own: list[list[int]] = []
        self._received: list[list[int]] = []
        self._over_limit: OverLimit | None = None

    def num_sent(self) -> int:
        """Waits for this rank's own counts; the rows that it sends, its own included."""
        return sum(self.sent())

    def sent(self) -> Sequence[int]:
        """Waits for this rank's own counts; its rows to each rank, its own included."""
        return [self._rows_to(of_peer) for of_peer in self.tells()[:: self._tp_size]]

    def tells(self) -> Sequence[Sequence[int]]:
        """Waits for this rank's own counts; what it tells each peer, [P * V][...]: rows by expert, or more."""
        if not self._own:
            self._own = self.counts.wait_for_own()
            if self._limit is not None:
                self._own, _ = self._limit.apart(self._own)
        return self._own

    def wait(self) -> R:
        """Waits for the counts."""
        if self._routes is None:
            counts = self.counts.wait()
            if self._limit is not None:
                counts, rows_of_all = self._limit.of_peers(counts)
                rows = rows_by_rank(rows_of_all, self._num_ranks)
                number = num_rounds(rows, self._limit.max_rows)
                if number > 1:
                    self._over_limit = OverLimit(number, rows, rows_of_all, counts.received_on_device)
            self._received = counts.received
            self._routes = self._make(counts)
        return self._routes

    def told(self) -> Sequence[Sequence[int]]:
        """Waits for the counts; what each peer tells, [P * V][...]: rows by expert, or more."""
        self.wait()
        return self._received

    def told_rows(self) -> Sequence[int]:
        """Waits for the counts; rows of a message from each peer, [P * V]."""
        return [self._rows_to(of_peer) for of_peer in self.told()]

    def received(self) -> list[list[int]]:
        """Waits for the counts; rows for each local expert from each peer, [P * V][e]."""
        num_experts = len(self.wait().rows_per_expert)
        return [of_peer[-num_experts:] for of_peer in self._received]  # behind what else a dispatch tells its peers

    def splits(self) -> RowSplits | None:
        """Waits for the counts; rows of the first message, to and from each rank that it connects.

        Returns:
            None if a rank's experts would get more rows than they may; see :meth:`over_limit`.
        """
        routes = self.wait()
        return routes.splits if self._over_limit is None else None

    def over_limit(self) -> OverLimit | None:
        """Waits for the counts; what makes the chunk go in several rounds, None if it goes in one."""
        self.wait()
        return self._over_limit


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
