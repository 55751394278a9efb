"""Plans with pairing against stock, in steps of Megatron's own schedules: every gradient, loss, log and collective."""

from itertools import pairwise

import pytest

from tests.gradient_deviations import TOLERANCE
from tests.parity.paired import paired_layouts_worker, paired_worker
from tests.parity.paired.paired_cases import (
    CASES,
    IN_LAYOUTS,
    IN_PIPELINES,
    LATE_FORWARDS,
    OTHER_SAMPLES,
    OTHER_SETTINGS,
    RANDOM_IN_BACKWARD,
    SWITCHED,
    SWITCHED_PLANS,
    Case,
)
from tests.ranks import launch

# Each worker runs all its cases in one start of its ranks.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(620)]

CASES_ON_FOUR = {name: case for name, (_, case) in (IN_LAYOUTS | IN_PIPELINES).items()}


on_two = launch.results(paired_worker.all_results, 2, timeout_s=600)
"""Per rank: what is found for each case."""
on_four = launch.results(paired_layouts_worker.all_results, 4, timeout_s=600)


def check(results, name: str, case: Case, check_gradients) -> None:
    """Fails unless a case's results are stock's: to the bit, or within the bound of changed sums."""
    # DDP counts reports in a step's last backward; those before it only accumulate.
    check_gradients.equal_stock(results, name, 0.0 if case.is_exact else TOLERANCE)
    for result in results:
        found = result[name]
        assert found["losses_equal"] or not case.is_exact
        assert found["buffers_equal"]
        assert (found["num_split_chunks"] > 0) == (case.max_rows is not None)
    # In an interleaved pipeline both steps have all micro-batches.
    lengths = [case.num_micro_batches] * 2 if name in IN_PIPELINES else [*case.lengths]
    assert lengths in [result[name]["num_losses"] for result in results]


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_stock(on_two, name, check_gradients):
    check(on_two, name, CASES[name], check_gradients)


@pytest.mark.parametrize("name", CASES_ON_FOUR)
def test_gradients_in_layouts_equal_stock(on_four, name, check_gradients):
    check(on_four, name, CASES_ON_FOUR[name], check_gradients)


@pytest.mark.parametrize("name", CASES)
def test_order_of_collectives_is_the_same_on_all_ranks(on_two, name):
    first, second = (result[name]["collectives"] for result in on_two)
    assert first == second
    assert any(op.startswith("reduce") for op in first)


@pytest.mark.parametrize("name", CASES_ON_FOUR)
def test_order_of_collectives_is_the_same_in_a_stage(on_four, name):
    layout, _ = {**IN_LAYOUTS, **IN_PIPELINES}[name]
    orders = [result[name]["collectives"] for result in on_four]
    stages = {"EP2xPP2": [orders[:2], orders[2:]], "PP4": [[order] for order in orders]}.get(layout, [orders])
    for stage in stages:
        assert all(order == stage[0] for order in stage)
        kind = "node_dispatch" if "two-hop" in name else "dispatch"
        assert any(f".I.{kind}" in op for op in stage[0])


def test_messages_of_a_backward_and_a_forward_take_turns(on_two):
    """Three micro-batches of three layers: the whole order, as ``schedule/pairing.py`` draws it."""
    sent = [op for op in on_two[0]["plain/M=3"]["collectives"] if not op.startswith("reduce")]
    forward = [op for layer in (1, 2, 3) for op in (f"L{layer}.c0.F.counts+dispatch", f"L{layer}.c0.F.combine")]
    backward = [f"L{layer}.c0.I.{kind}" for layer in (3, 2, 1) for kind in ("combine", "dispatch")]
    # A backward waits for its message in front of the next one; the forward's next message leaves before that.
    beside = [op for both in zip(backward, [*forward[1:], "next"], strict=True) for op in both]
    expected = [*forward, forward[0], *beside[:-1], forward[0], *beside[:-1], *backward]
    assert sent == [part for op in expected for part in _parts(op)]


def test_messages_of_two_hops_take_turns(on_four):
    """Three micro-batches of two layers with two hops: the whole order, as above."""
    sent = [op for op in on_four[0]["EP4/two-hop"]["collectives"] if not op.startswith("reduce")]
    hops = ["counts+node_dispatch", "local_dispatch", "local_combine", "node_combine"]
    forward = [f"L{layer}.c0.F.{hop}" for layer in (1, 2) for hop in hops]
    mirrored = ["node_combine", "local_combine", "local_dispatch", "node_dispatch"]
    backward = [f"L{layer}.c0.I.{kind}" for layer in (2, 1) for kind in mirrored]
    beside = [op for both in zip(backward, [*forward[1:], "next"], strict=True) for op in both]
    expected = [*forward, forward[0], *beside[:-1], forward[0], *beside[:-1], *backward]
    assert sent == [part for op in expected for part in _parts(op)]


def _parts(op: str) -> list[str]:
    """The exchange of counts goes ahead of the dispatch."""
    place, plus, dispatch = op.partition("counts+")
    return [f"{place}counts", f"{place}{dispatch}"] if plus else [op]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("plain/M=3", "plain/erratic-wire"),
        ("plain/M=3", "plain/gaps"),
        ("plain/M=3", "plain/dw-memory"),
        ("plain/none", "plain/none/erratic-wire"),
    ],
)
def test_order_of_collectives_depends_on_the_plan_alone(on_two, one, other):
    for result in on_two:
        assert result[one]["collectives"] == result[other]["collectives"]


def test_forward_after_a_backward_with_few_messages(on_two):
    """Nothing needs a gradient in front of the second layer."""
    sent = [op for op in on_two[0]["frozen-first-layer"]["collectives"] if not op.startswith("reduce")]
    assert not any(op.startswith("L1.") and ".I." in op for op in sent)
    first_end = sent.index("L2.c0.I.dispatch")
    assert sent[first_end : first_end + 4] == [
        "L2.c0.I.dispatch",
        "L3.c0.F.counts",
        "L3.c0.F.dispatch",
        "L3.c0.F.combine",
    ]


def test_chunks_are_those_of_the_middle_and_of_the_ends(on_two):
    def chunks_of(name: str) -> list[int]:
        """Chunks of each forward in turn, by the dispatches of its first layer."""
        sent = [op for op in on_two[0][name]["collectives"] if op.startswith("L1.") and op.endswith("F.dispatch")]
        starts = [index for index, op in enumerate(sent) if ".c0." in op] + [len(sent)]
        return [end - start for start, end in pairwise(starts)]

    assert chunks_of("chunks-at-ends") == [2, 1, 1, 2]
    assert chunks_of("chunks-in-middle") == [1, 3, 3, 1]
    assert chunks_of("chunks/one-micro-batch") == [2]


def test_ends_of_an_interleaved_pipeline_have_own_chunks(on_four):
    """Of 8 micro-batches and 2 virtual stages: those of the warm-up, and those whose backward is in the cool-down."""
    for rank, num_without_partner in ((0, 5), (3, 3)):
        sent = on_four[rank]["EP2xPP2/chunks-at-ends"]["collectives"]
        in_two = sum(op.endswith("c1.F.dispatch") for op in sent)
        assert in_two == 2 * num_without_partner
        assert sum(op.endswith("c0.F.dispatch") for op in sent) == 16


def test_switching_to_pairs_and_back_changes_no_gradient(on_two, check_gradients):
    """Each step against stock on the same weights, which move on."""
    first, second = (result[SWITCHED] for result in on_two)
    assert [found["plan"] for found in first] == ["paired", *SWITCHED_PLANS, "paired"]
    for ours, theirs in zip(first, second, strict=True):
        plan = SWITCHED_PLANS[ours["plan"]]
        assert ours["collectives"] == theirs["collectives"]
        assert _has_pairs(ours["collectives"]) == plan.is_paired, ours["plan"]
        for found in (ours, theirs):
            bound = 0.0 if plan.num_chunks == 1 else TOLERANCE
            check_gradients(found["gradients"], bound, found["plan"])
            assert found["loss"] <= bound
            assert found["logged"] <= bound
            assert found["reports"] == dict.fromkeys(found["gradients"], 1)
            assert (found["num_deferred"] == 0) == found["plan"].endswith("none")


def _has_pairs(collectives: list[str]) -> bool:
    """Whether messages of a forward leave between those of a backward."""
    is_forward = [".F." in op for op in collectives if not op.startswith("reduce")]
    # Three micro-batches one after the other: F B F B F B.
    return sum(before != after for before, after in pairwise(is_forward)) > 5


def test_comparison_detects_random_numbers_in_a_backward(on_two):
    for result in on_two:
        found = result[RANDOM_IN_BACKWARD]
        assert not found["losses_equal"]
        assert max(found["gradients"].values()) > 1e4 * TOLERANCE


def test_comparison_detects_forwards_in_another_order(on_two):
    """Two summands in another order are the same sum: only each micro-batch's own loss tells."""
    for result in on_two:
        found = result[OTHER_SAMPLES]
        assert not found["losses_equal"]
        assert found["loss"] > 100 * TOLERANCE


def test_comparison_detects_turns_that_differ_between_ranks(on_two):
    """Without expert parallelism: otherwise ranks would wait for each other."""
    first, second = (result[LATE_FORWARDS] for result in on_two)
    assert first["collectives"] != second["collectives"]
    assert sorted(first["collectives"]) == sorted(second["collectives"])
    for found in (first, second):
        assert set(found["gradients"].values()) == {0.0}
        assert found["losses_equal"]


def test_a_forward_with_settings_of_another_place_stops_the_step(on_two):
    for result in on_two:
        assert "a forward took 13 turns, and 7 were planned" in result[OTHER_SETTINGS]
