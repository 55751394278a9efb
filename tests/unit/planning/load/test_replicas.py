"""Replicas: where they are, and that every token has exactly one holder of its expert."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.planning.load.popularity import most_over_mean
from megatron_lancet.planning.load.replicas import (
    ExpertHolders,
    choose_holders,
    holder_of,
    holders_in_turn,
    rows_of_ranks,
    why_not_replicas,
)

ZIPF = [1000 // (expert + 1) for expert in range(8)]


@st.composite
def layers(draw):
    """Popularity, ranks and replicas of a layer, and the ranks of a node."""
    num_ranks = draw(st.integers(2, 6))
    own = draw(st.integers(1, 4))
    per_rank = draw(st.integers(0, min(4, num_ranks * own - own)))
    popularity = draw(st.lists(st.integers(0, 1000), min_size=num_ranks * own, max_size=num_ranks * own))
    return popularity, num_ranks, num_ranks * per_rank, draw(st.sampled_from([None, 1, 2, 3]))


@given(layers())
def test_every_place_is_used_once(layer):
    popularity, num_ranks, num_replicas, _ = layer
    holders = choose_holders(popularity, num_ranks, num_replicas)
    assert holders.num_ranks == num_ranks
    slots = [holders.slot(expert, rank) for expert in range(len(popularity)) for rank in holders.of_expert(expert)]
    assert sorted(slots) == list(range(len(popularity) + num_replicas))
    for rank, replicas in enumerate(holders.replicas):
        assert len(replicas) == num_replicas // num_ranks
        assert all(holders.home(expert) != rank for expert in replicas)


@given(layers(), st.integers(0, 200))
def test_every_token_goes_to_one_holder_near_ones_first(layer, num_tokens):
    popularity, num_ranks, num_replicas, per_node = layer
    holders = choose_holders(popularity, num_ranks, num_replicas)
    for source in range(num_ranks):
        for expert, in_turn in enumerate(holders_in_turn(holders, source, per_node)):
            everywhere = holders.of_expert(expert)
            rows = Counter(holder_of(in_turn, source, number) for number in range(num_tokens))
            assert rows.total() == num_tokens
            assert rows.keys() <= set(everywhere)
            used = [rows[rank] for rank in in_turn]
            assert max(used) - min(used) <= 1
            if source in everywhere:
                assert in_turn == (source,)
            elif per_node and any(rank // per_node == source // per_node for rank in everywhere):
                assert {rank // per_node for rank in in_turn} == {source // per_node}
            else:
                assert in_turn == everywhere


@given(layers(), st.data())
def test_rows_of_ranks_are_those_of_the_rule(layer, data):
    popularity, num_ranks, num_replicas, per_node = layer
    holders = choose_holders(popularity, num_ranks, num_replicas)
    number = st.integers(0, 20)
    rows = [data.draw(st.lists(number, min_size=len(popularity), max_size=len(popularity))) for _ in range(num_ranks)]
    one_by_one = Counter(
        holder_of(in_turn, source, number)
        for source in range(num_ranks)
        for in_turn, chosen in zip(holders_in_turn(holders, source, per_node), rows[source], strict=True)
        for number in range(chosen)
    )
    found = rows_of_ranks(rows, holders, per_node)
    assert found.computed == tuple(one_by_one[rank] for rank in range(num_ranks))
    assert found.sent == sum(
        number
        for source in range(num_ranks)
        for expert, number in enumerate(rows[source])
        if source not in holders.of_expert(expert)
    )


def test_popular_experts_get_replicas_elsewhere():
    assert choose_holders(ZIPF, 2, 2).replicas[1] == (0,)
    assert choose_holders([1, 1, 1, 9], 4, 4).replicas[:3] == ((3,), (3,), (3,))


def test_replicas_do_not_make_a_full_rank_fuller():
    """Each rank has a popular expert: two replicas of these would leave the ranks as uneven as their other experts."""
    popularity = [350, 225, 400, 25]
    assert choose_holders(popularity, 2, 2).replicas == ((3,), (1,))


def test_replicas_even_out_the_ranks_and_save_rows():
    rows = [ZIPF, ZIPF]
    before = rows_of_ranks(rows, ExpertHolders(8, ((), ())))
    after = rows_of_ranks(rows, choose_holders(ZIPF, 2, 4))
    assert most_over_mean(before.computed) == pytest.approx(1.53, abs=0.01)
    assert most_over_mean(after.computed) < 1.15
    assert sum(before.computed) == sum(after.computed) == 2 * sum(ZIPF)
    assert before.sent == sum(ZIPF)
    assert after.sent < 0.5 * before.sent


@given(layers())
def test_each_rank_can_hold_everything(layer):
    """Then nothing is sent, and every rank gets the rows of its own tokens."""
    popularity, num_ranks, _, per_node = layer
    own = len(popularity) // num_ranks
    holders = choose_holders(popularity, num_ranks, num_ranks * (len(popularity) - own))
    found = rows_of_ranks([popularity] * num_ranks, holders, per_node)
    assert found.sent == 0
    assert set(found.computed) == {sum(popularity)}


def test_a_rank_that_does_not_hold_an_expert_has_no_place_for_it():
    with pytest.raises(ValueError, match="not in tuple"):
        ExpertHolders(4, ((2,), (0,))).slot(1, 1)


@pytest.mark.parametrize(
    ("replicas", "experts", "ranks", "expected"),
    [
        (4, 8, 2, None),
        (8, 8, 2, None),
        (2, 8, 1, "one rank holds all experts"),
        (3, 8, 2, "pass a multiple of the 2 ranks"),
        (10, 8, 2, "with 8 every one of the 2 ranks holds all 8 experts"),
    ],
)
def test_replicas_that_a_layer_cant_have(replicas, experts, ranks, expected):
    reason = why_not_replicas(replicas, experts, ranks)
    assert reason is None if expected is None else expected in reason
