"""The load of experts from exchanged counts: sums over exchanges, groups and holders of cut experts."""

from megatron_lancet.planning.load.expert_load import ExpertLoad, LayerLoad
from megatron_lancet.profiler.expert_load import ExpertRows, RankLoad, load_of


def test_counts_of_several_exchanges_are_summed_by_source():
    rows = ExpertRows(expert_tp_size=1)
    rows.add(2, [[1, 2], [3, 4]])
    rows.add(2, [[10, 0], [0, 10]])
    rows.add(3, [[5, 5], [5, 5]])
    assert rows.take() == {2: [[11, 2], [3, 14]], 3: [[5, 5], [5, 5]]}
    assert rows.take() == {}


def test_ranks_that_hold_parts_of_same_experts_are_one_source():
    rows = ExpertRows(expert_tp_size=2)
    rows.add(1, [[1, 2], [10, 20], [3, 4], [30, 40]])
    assert rows.take() == {1: [[11, 22], [33, 44]]}


def test_a_repeated_layer_has_the_rows_of_all_its_numbers():
    rows = ExpertRows(expert_tp_size=1)
    for layer in (2, 3, 4):
        rows.add(layer, [[layer, 0], [0, 1]])
    assert rows.take_by({2: 2, 3: 3, 4: 3}) == {2: [[2, 0], [0, 1]], 3: [[7, 0], [0, 2]]}
    assert rows.take() == {}


def rank(place, experts, rows, is_counted=True):
    return RankLoad(place, is_counted, {2: experts}, {2: rows})


def test_the_load_is_by_logical_expert_and_sums_all_groups():
    ranks = [
        rank(0, (0, 3), [[1, 2], [3, 4]]),
        rank(1, (2, 1), [[5, 6], [7, 8]]),
        rank(0, (0, 3), [[10, 20], [30, 40]]),
        rank(1, (2, 1), [[50, 60], [70, 80]]),
        rank(1, (2, 1), [[900, 900], [900, 900]], is_counted=False),
    ]
    assert load_of(ranks, 2, 6, 4) == ExpertLoad(6, 4, (LayerLoad(2, ((11, 66, 55, 22), (33, 88, 77, 44))),))


def test_a_world_of_which_one_rank_exists_has_no_load():
    assert load_of([rank(0, (0, 1), [[1, 2], [3, 4]])], 2, 6, 4) is None
    assert load_of([RankLoad(0, True, {}, {}), RankLoad(1, True, {}, {})], 2, 6, 4) is None
