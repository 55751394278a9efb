"""Replicas of popular experts, and which of an expert's holders a token goes to.

The experts of a layer are shared evenly by P ranks. R further slots, R / P on each rank, hold replicas of popular
experts. Popularity changes, so a replica is chosen for a text, and no weight is ever trained in two places: this is for
evaluation.

Legend: P ranks, E experts, R replicas.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_lancet.planning.load.popularity import Shares, shares_of

_DIGITS = 9
"""Of costs that are compared: sums of the same shares in another order differ in the last bits."""


@dataclass(frozen=True)
class ExpertHolders:
    """The ranks that hold each expert of a layer.

    Attributes:
        num_experts: E.
        replicas: of each rank, the experts that it holds in addition to its own, in ascending order; equally many
            everywhere.
    """

    num_experts: int
    replicas: tuple[tuple[int, ...], ...]

    @property
    def num_ranks(self) -> int:
        """P."""
        return len(self.replicas)

    @property
    def slots_per_rank(self) -> int:
        """Experts that a rank holds: its own and its replicas."""
        return self.num_experts // self.num_ranks + len(self.replicas[0])

    def home(self, expert: int) -> int:
        """The rank that has an expert even without replicas."""
        return expert // (self.num_experts // self.num_ranks)

    def of_expert(self, expert: int) -> tuple[int, ...]:
        """All ranks that hold an expert, in order."""
        return tuple(
            rank for rank in range(self.num_ranks) if rank == self.home(expert) or expert in self.replicas[rank]
        )

    def slot(self, expert: int, rank: int) -> int:
        """Number of the slot where a holder has an expert, over the slots of all ranks: first its own, then replicas.

        Raises:
            ValueError: the rank does not hold it.
        """
        own = self.num_experts // self.num_ranks
        if rank == self.home(expert):
            return rank * self.slots_per_rank + expert % own
        return rank * self.slots_per_rank + own + self.replicas[rank].index(expert)


def why_not_replicas(num_replicas: int, num_experts: int, num_ranks: int) -> str | None:
    """Why a layer can't have this number of replicas, as the end of a sentence; None if it can."""
    if num_ranks == 1:
        return "one rank holds all experts: start several ranks"
    if num_replicas % num_ranks:
        return f"every rank holds equally many: pass a multiple of the {num_ranks} ranks"
    most = num_ranks * (num_experts - num_experts // num_ranks)
    if num_replicas > most:
        return f"with {most} every one of the {num_ranks} ranks holds all {num_experts} experts"
    return None


def choose_holders(popularity: Sequence[float], num_ranks: int, num_replicas: int) -> ExpertHolders:
    """Chooses which experts get replicas, and where: popular ones, so that no rank gets many more rows than others.

    One replica after the other is put where it makes the sum of two figures least: the rows of the fullest rank, and
    the rows that the busiest rank exchanges with others. Then replicas are exchanged one by one while that helps. All
    ranks are taken to have tokens of the same popularity. Of equals the more popular expert is taken.

    Args:
        popularity: rows of each expert, or shares, [E].
        num_ranks: P, a divisor of E.
        num_replicas: R; see :func:`why_not_replicas`.
    """
    assert why_not_replicas(num_replicas, len(popularity), num_ranks) is None
    choice = _Choice(shares_of(popularity), num_ranks, num_replicas // num_ranks)
    for _ in range(num_replicas):
        choice.add(*choice.best(rank for rank in range(num_ranks) if choice.free(rank)))
    for _ in range(num_replicas):  # a few rounds do: an exchange that helps is rare
        if not choice.exchange_one():
            break
    return ExpertHolders(len(popularity), tuple(tuple(sorted(its)) for its in choice.replicas))


class _Choice:
    """A growing choice of replicas, and the rows that are expected of it, as shares of all rows."""

    def __init__(self, shares: Shares, num_ranks: int, slots: int) -> None:
        self._shares = shares
        self._num_ranks = num_ranks
        self._slots = slots
        own = len(shares) // num_ranks
        self._holders = [{expert // own} for expert in range(len(shares))]
        self.replicas: list[set[int]] = [set() for _ in range(num_ranks)]
        self._computed, self._received, self._sent = ([0.0] * num_ranks for _ in range(3))
        for expert in range(len(shares)):
            self._count(expert, 1)

    def free(self, rank: int) -> bool:
        """Whether a rank has a slot left."""
        return len(self.replicas[rank]) < self._slots

    def add(self, expert: int, rank: int) -> None:
        """Put a replica on a rank."""
        self._change(expert, rank, self._holders[expert].add)
        self.replicas[rank].add(expert)

    def remove(self, expert: int, rank: int) -> None:
        """Take a replica away from a rank."""
        self._change(expert, rank, self._holders[expert].remove)
        self.replicas[rank].remove(expert)

    def best(self, ranks: Iterable[int]) -> tuple[int, int]:
        """The expert and the rank (among these) for which a replica helps most."""
        candidates = []
        for rank in ranks:
            for expert, holders in enumerate(self._holders):
                if rank not in holders:
                    self._change(expert, rank, holders.add)
                    candidates.append((round(self.cost, _DIGITS), -self._shares[expert], expert, rank))
                    self._change(expert, rank, holders.remove)
        _, _, expert, rank = min(candidates)
        return expert, rank

    def exchange_one(self) -> bool:
        """Exchange a replica for another one on the same rank, if that helps; returns whether it did."""
        before = round(self.cost, _DIGITS)
        for rank, replicas in enumerate(self.replicas):
            for expert in sorted(replicas):
                self.remove(expert, rank)
                other, _ = self.best([rank])
                self.add(other, rank)
                if round(self.cost, _DIGITS) < before:
                    return True
                self.remove(other, rank)
                self.add(expert, rank)
        return False

    @property
    def cost(self) -> float:
        """Rows of the fullest rank and rows that the busiest rank exchanges."""
        return max(self._computed) + max(*self._received, *self._sent)

    def _change(self, expert: int, rank: int, change: Callable[[int], None]) -> None:
        self._count(expert, -1)
        change(rank)
        self._count(expert, 1)

    def _count(self, expert: int, sign: int) -> None:
        """Adds the rows of an expert, or takes them away: a holder's own tokens stay, the others' go in turn."""
        holders = self._holders[expert]
        share = sign * self._shares[expert]
        for rank in range(self._num_ranks):
            if rank in holders:
                self._computed[rank] += share / len(holders)
                self._received[rank] += share * (1 / len(holders) - 1 / self._num_ranks)
            else:
                self._sent[rank] += share / self._num_ranks


def holders_in_turn(
    holders: ExpertHolders, source: int, ranks_per_node: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The ranks to which one rank's tokens go for each expert, in turn.

    The rank itself if it holds the expert; else the ranks of its node that hold it; else all that hold it.

    Args:
        source: rank of the tokens.
        ranks_per_node: None where it is unknown; then no other rank counts as near.
    """
    per_node = ranks_per_node or 1
    found = []
    for expert in range(holders.num_experts):
        everywhere = holders.of_expert(expert)
        near = tuple(rank for rank in everywhere if rank // per_node == source // per_node)
        found.append((source,) if source in everywhere else near or everywhere)
    return tuple(found)


def holder_of(in_turn: Sequence[int], source: int, number: int) -> int:
    """The rank to which a token goes for an expert: a function of the routes alone, so that a run can be repeated.

    Args:
        in_turn: of the expert, from :func:`holders_in_turn`.
        source: rank of the token. The ranks begin at different holders, so that the remainder is also spread.
        number: of the token, among the tokens of its rank and batch that chose the expert, from 0.
    """
    return in_turn[(number + source) % len(in_turn)]


@dataclass(frozen=True)
class RowsOfRanks:
    """Rows of one batch.

    Attributes:
        computed: that each rank's experts get, [P].
        sent: of all ranks, those that go to another rank.
    """

    computed: tuple[int, ...]
    sent: int


def rows_of_ranks(
    rows: Sequence[Sequence[int]], holders: ExpertHolders, ranks_per_node: int | None = None
) -> RowsOfRanks:
    """Rows of a batch for each rank by the rule of :func:`holder_of`.

    Args:
        rows: of one batch, from each rank for each expert, [P][E].
        ranks_per_node: as for :func:`holders_in_turn`.
    """
    computed, sent = [0] * holders.num_ranks, 0
    for source, of_source in enumerate(rows):
        in_turn = holders_in_turn(holders, source, ranks_per_node)
        for expert, number in enumerate(of_source):
            each, rest = divmod(number, len(in_turn[expert]))
            sent += 0 if source in in_turn[expert] else number
            for rank in in_turn[expert]:
                computed[rank] += each
            for left in range(rest):
                computed[holder_of(in_turn[expert], source, left)] += 1
    return RowsOfRanks(tuple(computed), sent)
