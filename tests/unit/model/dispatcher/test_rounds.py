"""Rounds of a chunk: each row in exactly one, the same on all ranks, no rank over its limit, and no round too many."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from megatron_lancet.features.row_bound.limit import RowLimit, num_rounds, rows_by_rank
from megatron_lancet.features.row_bound.rounds import Round, rounds_of
from megatron_lancet.runtime.transport.base import TokenCounts

LIKE = torch.zeros(1)


class Layout(NamedTuple):
    """P ranks with e experts on each, whose parts are on V ranks."""

    ranks: int
    holders: int
    experts: int

    @property
    def sources(self) -> int:
        return self.ranks * self.holders


def skewed_counts(dice: random.Random, layout: Layout) -> list[list[int]]:
    """Rows from each rank to each expert: even, to one expert, to one rank, from one rank, sparse, or any."""
    total = layout.ranks * layout.experts
    hot = dice.randrange(total)
    kind = dice.choice(["even", "one-expert", "one-rank", "one-source", "sparse", "any"])
    size = dice.choice([1, 3, 40])

    def rows(source: int, expert: int) -> int:
        match kind:
            case "even":
                return size
            case "one-expert":
                return size * (expert == hot)
            case "one-rank":
                return size * (expert // layout.experts == hot // layout.experts)
            case "one-source":
                return dice.randrange(size + 1) * (source == hot % layout.sources)
            case "sparse":
                return int(dice.random() < 0.1)
            case _:
                return dice.randrange(size + 1)

    return [[rows(source, expert) for expert in range(total)] for source in range(layout.sources)]


def rounds_of_all(layout: Layout, counts: Sequence[Sequence[int]], number: int) -> list[list[Round]]:
    """The rounds of each rank, each made on its own."""
    return [
        rounds_of(counts, layout.ranks, number, source // layout.holders, source % layout.holders, LIKE)
        for source in range(layout.sources)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_each_row_is_in_one_round_and_no_rank_over_its_limit(seed):
    dice = random.Random(seed)
    layout = Layout(dice.choice([2, 3, 4, 8]), dice.choice([1, 1, 2]), dice.choice([1, 2, 5]))
    counts = skewed_counts(dice, layout)
    rows = rows_by_rank(counts, layout.ranks)
    limit = dice.choice([1, 2, 7, 50, max(1, max(rows) - 1), max(1, max(rows))])
    number = num_rounds(rows, limit)
    assert (number - 1) * limit < max(1, max(rows)) <= number * limit  # one round fewer would be over the limit
    of_all = rounds_of_all(layout, counts, number)
    experts_of_rows = [
        [expert for expert, size in enumerate(own) for _ in range(size)] for own in counts
    ]  # in the order in which a rank has its rows
    seen = [[0] * len(own) for own in experts_of_rows]
    for index in range(number):
        of_round = [rounds[index] for rounds in of_all]
        for source, one in enumerate(of_round):
            for row in (row for part in one.sent for row in range(part.start, part.stop)):
                seen[source][row] += 1
            check_receivers_expect_what_is_sent(layout, of_round, source, experts_of_rows[source])
        for source, one in enumerate(of_round):
            assert int(one.rows_by_source.sum()) == sum(one.rows_by_expert_tp_rank) <= limit
            assert sum(one.splits.received) == one.rows_by_expert_tp_rank[source % layout.holders]
            even = rows[source // layout.holders] / number
            assert abs(int(one.rows_by_source.sum()) - even) < 1
    assert all(number == 1 for own in seen for number in own)


def check_receivers_expect_what_is_sent(
    layout: Layout, of_round: Sequence[Round], source: int, experts: Sequence[int]
) -> None:
    """The rows that a rank sends to each other one are of the experts that this one expects from it, in their order."""
    rank, holder = divmod(source, layout.holders)
    for to, part in enumerate(of_round[source].sent):
        sent = [expert - to * layout.experts for expert in experts[part]]
        assert sent == sorted(sent)
        assert len(sent) == of_round[source].splits.sent[to]
        assert of_round[to * layout.holders + holder].splits.received[rank] == len(sent)
        for there in range(layout.holders):  # all holders of the experts gather these rows
            expected = of_round[to * layout.holders + there].rows_by_source[holder * layout.ranks + rank].tolist()
            assert [sent.count(expert) for expert in range(layout.experts)] == expected


def test_the_check_notices_ranks_that_cut_differently():
    """Negative control: one rank makes one round more than the others."""
    layout, counts = Layout(2, 1, 2), [[4, 4, 4, 4], [4, 4, 4, 4]]
    first, second = rounds_of_all(layout, counts, 2)[0], rounds_of_all(layout, counts, 3)[1]
    with pytest.raises(AssertionError):
        check_receivers_expect_what_is_sent(layout, [first[0], second[0]], 1, [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4)


def test_rows_go_out_and_come_back_to_their_places():
    layout, counts = Layout(2, 1, 2), [[3, 0, 5, 1], [2, 2, 2, 2]]
    rows_n, found_n = torch.arange(9.0), torch.full((9,), -1.0)
    for one in rounds_of_all(layout, counts, 3)[0]:
        assert len(one.picked(rows_n)) == sum(one.splits.sent)
        one.put_back(one.picked(rows_n) * 2, found_n)
    assert found_n.equal(rows_n * 2)


def test_counts_for_a_peer_and_those_for_all_are_told_apart():
    chosen_tE = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]).bool()
    limit = RowLimit(5, 4, 2)
    told = limit.with_counts_of_all(lambda: torch.tensor([7, 8, 9, 10]), chosen_tE, 2)
    assert told.view(2, -1).tolist() == [[7, 8, 2, 2, 1, 1], [9, 10, 2, 2, 1, 1]]
    received = torch.tensor([[7, 8, 2, 2, 1, 1], [1, 2, 3, 4, 5, 6]])
    counts, of_all = limit.split_counts(TokenCounts(told.view(2, -1).tolist(), received.tolist(), received))
    assert (counts.sent, counts.received) == ([[7, 8], [9, 10]], [[7, 8], [1, 2]])
    assert counts.received_on_device.tolist() == [[7, 8], [1, 2]]
    assert of_all == [[2, 2, 1, 1], [3, 4, 5, 6]]
    assert rows_by_rank(of_all, 2) == [11, 13]
    assert num_rounds(rows_by_rank(of_all, 2), limit.max_rows) == 3
