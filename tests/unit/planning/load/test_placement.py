"""The solver of placements, by properties, and the file of a placement."""

import json
import random

import pytest

from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.load.expert_load import LayerLoad
from megatron_lancet.planning.load.placement import (
    contiguous,
    cost,
    placement_to_json,
    read_placement,
    rows_between_nodes,
    rows_of_ranks,
    solve,
)
from megatron_lancet.planning.load.popularity import most_over_mean


def zipf(num_experts, ep_size, total=10_000):
    weights = [1 / (rank + 1) for rank in range(num_experts)]
    rows = tuple(round(total * weight / sum(weights)) for weight in weights)
    return LayerLoad(1, (rows,) * ep_size)


def random_load(generator, num_experts, ep_size):
    skew = generator.choice((0, 1, 3))
    return LayerLoad(
        1,
        tuple(
            tuple(round(100 * generator.random() ** skew * generator.randint(0, 9)) for _ in range(num_experts))
            for _ in range(ep_size)
        ),
    )


@pytest.mark.parametrize("seed", range(40))
def test_placement_is_permutation_never_worse_and_always_same(seed):
    generator = random.Random(seed)
    ep_size = generator.choice((1, 2, 4, 8))
    num_experts = ep_size * generator.randint(1, 6)
    ranks_per_node = generator.choice([None, *(size for size in (1, 2, 4) if ep_size % size == 0)])
    load = random_load(generator, num_experts, ep_size)
    found = solve(load, ep_size, ranks_per_node)
    assert sorted(found) == list(range(num_experts))
    before = cost(load, contiguous(num_experts), ep_size, ranks_per_node)
    assert cost(load, found, ep_size, ranks_per_node) <= before
    assert solve(load, ep_size, ranks_per_node) == found


@pytest.mark.parametrize(("num_experts", "ep_size"), [(16, 2), (64, 8), (256, 64)])
def test_popular_experts_are_spread(num_experts, ep_size):
    load = zipf(num_experts, ep_size)
    before = most_over_mean(rows_of_ranks(load.rows_per_expert, contiguous(num_experts), ep_size))
    after = most_over_mean(rows_of_ranks(load.rows_per_expert, solve(load, ep_size), ep_size))
    # No placement divides the most popular expert, and with it is the same number of others as elsewhere.
    rows = sorted(load.rows_per_expert)
    bound = (rows[-1] + sum(rows[: num_experts // ep_size - 1])) * ep_size / sum(rows)
    assert before > 1.5
    assert after <= max(1.02, 1.02 * bound)


def test_several_ranks_with_most_rows_are_all_relieved():
    load = LayerLoad(1, ((9, 9, 9, 9, 1, 1, 1, 1),) * 4)
    assert rows_of_ranks(load.rows_per_expert, contiguous(8), 4) == [72, 72, 8, 8]
    assert rows_of_ranks(load.rows_per_expert, solve(load, 4), 4) == [40] * 4


def test_experts_that_stay_on_their_rank_stay_in_their_place():
    load = LayerLoad(1, ((8, 6, 1, 1), (8, 6, 1, 1)))
    placement = solve(load, 2)
    moved = [slot for slot, expert in enumerate(placement) if slot != expert]
    assert len(moved) == 2
    assert most_over_mean(rows_of_ranks(load.rows_per_expert, placement, 2)) < 1.2


def test_an_even_load_moves_nothing():
    assert solve(LayerLoad(1, ((5,) * 8,) * 4), 4) == contiguous(8)
    assert solve(LayerLoad(1, ((0,) * 8,) * 4), 4) == contiguous(8)


def test_with_nodes_experts_move_to_the_node_that_asks_for_them():
    # Ranks are even already; all tokens of node 0 want experts of node 1, and the other way round.
    rows = ((0, 0, 6, 6), (0, 0, 6, 6), (6, 6, 0, 0), (6, 6, 0, 0))
    load = LayerLoad(1, rows)
    assert solve(load, 4) == contiguous(4)
    assert rows_between_nodes(load, contiguous(4), 4, 2) == 48
    assert rows_between_nodes(load, solve(load, 4, 2), 4, 2) == 0


def test_load_of_another_size_is_spread_evenly_over_nodes():
    load = zipf(16, 2)
    placement = solve(load, 8, ranks_per_node=4)
    assert rows_between_nodes(load, placement, 8, 4) == pytest.approx(sum(load.rows_per_expert) / 2)


@pytest.mark.parametrize(
    ("ep_size", "ranks_per_node", "problem"),
    [(3, None, "8 experts can't be spread evenly over 3 ranks"), (4, 3, "4 ranks can't be spread evenly over nodes")],
)
def test_sizes_that_do_not_divide_are_refused(ep_size, ranks_per_node, problem):
    with pytest.raises(ValueError, match=problem):
        solve(zipf(8, 4), ep_size, ranks_per_node)


def test_a_placement_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "placement.json"
    path.write_text(placement_to_json({10: (1, 0), 2: (0, 1)}))
    assert read_placement(path) == {2: (0, 1), 10: (1, 0)}
    assert json.loads(path.read_text()) == {"version": 1, "layers": {"2": [0, 1], "10": [1, 0]}}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"version": 2, "layers": {"1": [0, 1]}}, "expected version 1 of the placement's format, found 2"),
        ({"version": 1}, "field 'layers' is missing"),
        ({"version": 1, "layers": {}}, "it places the experts of no layer"),
        ({"version": 1, "layers": {"0": [0, 1]}}, "layers must have numbers from 1, found '0'"),
        ({"version": 1, "layers": {"01": [0, 1]}}, "layers must have numbers from 1, found '01'"),
        (
            {"version": 1, "layers": {"1": [0, 0, 3]}},
            r"each of its 3 experts once, found several times: \[0\]",
        ),
        ({"version": 1, "layers": {"1": [0, 1.5]}}, r"layers.1\[1\]: expected an integer, found 1.5"),
        ({"version": 1, "layers": {"1": [0, -1]}}, r"expected 0 to \d+, found -1"),
    ],
)
def test_a_damaged_placement_is_refused_in_one_line(tmp_path, content, problem):
    path = tmp_path / "placement.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=problem) as raised:
        read_placement(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)
