"""What moving experts could gain at most, from loads that are known."""

import pytest

from benchmarks.drift.__main__ import parse_arguments, summary
from benchmarks.drift.bound import bounds, read_loads, summed
from megatron_lancet.errors import UsageError
from megatron_lancet.planning.load.expert_load import LayerLoad

FIRST, SECOND = (40, 40, 10, 10), (40, 10, 10, 40)
"""Two experts have most rows. Both are on one rank in Megatron's order, and in the order by the first load."""


def steps(*loads):
    return [[LayerLoad(1, (load, load))] for load in loads]


def test_figures_of_a_load_that_changes_once():
    found = {one.name: one for one in bounds(steps(*[FIRST] * 22, *[SECOND] * 10), 2)}
    assert found["no placement"].most_over_mean == pytest.approx((20 * 1.6 + 10 * 1.0) / 30)
    start, late, early = (
        found[name]
        for name in ("at the start, by 2 steps", "every 10 steps, by the last 10", "every 10 steps, by the next 10")
    )
    assert (start.num_moves, late.num_moves) == (0, 0)
    assert start.most_over_mean == pytest.approx((20 * 1.0 + 10 * 1.6) / 30)
    assert late.most_over_mean == pytest.approx(start.most_over_mean)
    assert early.most_over_mean == pytest.approx(1.0)
    assert early.num_moves == 1


def test_loads_are_read_and_summed(tmp_path):
    path = tmp_path / "loads.jsonl"
    path.write_text("[[[1, 2], [3, 4]]]\n[[[10, 20], [30, 40]]]\n")
    assert [layer.rows for layer in summed(read_loads(path))] == [((11, 22), (33, 44))]


def test_a_runs_own_rule_follows_a_load_that_lasts():
    found = {one.name: one for one in bounds(steps(*[FIRST] * 2, *[SECOND] * 30), 2)}
    start, rule = (
        found[name] for name in ("at the start, by 2 steps", "every 10 steps, as --lancet-rebalance-interval")
    )
    assert start.most_over_mean == pytest.approx(1.6)
    assert rule.most_over_mean == pytest.approx((10 * 1.6 + 20 * 1.0) / 30)
    assert rule.num_moves == 1


def test_a_training_that_ends_with_its_first_steps_is_refused():
    with pytest.raises(UsageError, match="--steps 20 must be above --first 20: those place experts at the start"):
        parse_arguments(["--steps", "20"])
    assert parse_arguments(["--steps", "21"]).plan == "pairs"


def test_summary_leaves_out_first_steps_and_first_of_turns():
    def record(step_ms, lines=()):
        turns = [[500.0, 500.0], [900.0, step_ms], [900.0, step_ms]]
        return {"whole_ms": turns, "waited_ms": [[10.0, 10.0]] * 3, "lines": list(lines)}

    moved = "Megatron-Lancet experts: 1 pair of experts in layers 1 have changed ranks after step 4: ..."
    variants = {"none": record(120.0), "start": record(100.0), "moving": record(80.0, [moved])}
    text = summary({"variants": variants}, num_first=2)
    none, start, moving = text.splitlines()[1:]
    assert none.split() == ["none", "120", "ms", "8%", "0.833", "(0.833-0.833)", "0"]
    assert start.split()[:5] == ["start", "100", "ms", "10%", "1.000"]
    assert moving.split() == ["moving", "80", "ms", "12%", "1.250", "(1.250-1.250)", "1"]
