"""All-to-alls first: gradients are reduced in micro-ops, at fixed places, and come out as without."""

import json
from pathlib import Path

import pytest

from tests.gradient_deviations import TOLERANCE
from tests.parity.gradients.variants import precision_of
from tests.parity.runs.comm_priority_worker import CASES, CHUNK_BYTES
from tests.ranks import launch
from tests.ranks.pretraining import EP2, pretrain

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("comm_priority_worker.py")
PRIORITY = ["--overlap-grad-reduce", "--lancet-comm-priority", "all-to-all-first", "--lancet-grad-chunk-mb", "0.15"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Per rank: what the worker found for each case."""
    return launch.results_of(WORKER, 2, tmp_path_factory.mktemp("priority"), timeout_s=120)


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_whole_buckets(results, case, check_gradients):
    bound = 0.0 if case.endswith("/k=1") else TOLERANCE
    for rank, result in enumerate(results):
        found = result[case]
        assert found["has_gradients"]
        assert found["equals_ours_without_priority"]
        check_gradients(found["gradients"], bound, f"rank {rank}", precision_of(case))
        assert found["loss"] <= bound


@pytest.mark.parametrize("case", CASES)
def test_dense_gradients_are_reduced_once_in_micro_ops(results, case):
    """The experts' have no other rank to be reduced with."""
    for result in results:
        found = result[case]
        sizes = [int(entry.split()[1]) for entry in found["log"] if entry.startswith("reduce")]
        assert sum(sizes) == found["grad_bytes"] == found["dense_bytes"]
        assert max(sizes) <= CHUNK_BYTES
        assert len(sizes) == found["num_micro_ops"]
        assert found["grad_exposed_ms"] > 0


def check_places(log: list[str]) -> tuple[int, int]:
    """Micro-ops that left before the last all-to-all was back, and after; fails for one that left beside another."""
    last = max(i for i, entry in enumerate(log) if entry.startswith("back"))
    out: set[str] = set()
    open_layers: dict[str, int] = {}
    room = 0
    num_between = 0
    for entry in log[:last]:
        if entry.startswith("back "):
            out.remove(entry.removeprefix("back "))
            layer, _, _, kind = entry.removeprefix("back ").split(".")
            open_layers[layer] -= kind == "dispatch"
            room = CHUNK_BYTES
        elif ".I." in entry:
            out.add(entry)
            open_layers[entry.split(".")[0]] = open_layers.get(entry.split(".")[0], 0) + entry.endswith("combine")
        elif entry.startswith("reduce"):
            room -= int(entry.split()[1])
            assert not out
            assert not any(open_layers.values()), "a combine was reached, and its dispatch is not back"
            assert room >= 0, "more than one chunk at a place"
            num_between += 1
    return num_between, sum(entry.startswith("reduce") for entry in log[last:])


@pytest.mark.parametrize("case", CASES)
def test_micro_ops_are_launched_where_no_all_to_all_is_pending(results, case):
    for result in results:
        found = result[case]
        between, after = check_places(found["log"])
        assert between == found["num_between"]
        assert after > 0
        # With two chunks in the whole stack, one of them is on the wire from the first combine to the last dispatch.
        assert (between > 0) == (case != "stack/k=2")


@pytest.mark.parametrize("case", CASES)
def test_order_of_collectives_is_the_same_on_all_ranks(results, case):
    assert results[0][case]["log"] == results[1][case]["log"]


def test_order_of_collectives_does_not_depend_on_the_wire(results):
    for result in results:
        found = result["erratic-wire"]
        assert found["equals_ours_without_priority"]
        assert found["log"] == result["reduce-scatter/k=2"]["log"]


def test_gradient_chunk_smaller_than_a_parameter_is_refused(results):
    for result in results:
        assert result["chunk-too-small"].startswith("--lancet-grad-chunk-mb 0.0001 is less than the smallest parameter")


LAYOUTS = {
    "distributed-optimizer": (
        2,
        "--num-layers 4 --use-distributed-optimizer --overlap-param-gather --bf16 --clip-grad 0.1".split(),
    ),
    "PP2": (4, "--num-layers 6 --pipeline-model-parallel-size 2".split()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_equal_stock(token_data, tmp_path, layout):
    """The real loop, several micro-batches, clipped: one chunk, so that not a bit may differ."""
    num_ranks, flags = LAYOUTS[layout]
    both = [*EP2, *flags, "--ddp-bucket-size", "10000", "--overlap-grad-reduce"]
    expected = pretrain(token_data, [*both, "--lancet-plan", "off"], tmp_path / "stock", num_ranks, train_iters=5)
    ours = ["--lancet-num-chunks", "1", "--lancet-report", tmp_path, *PRIORITY]
    found = pretrain(token_data, [*both, *ours], tmp_path / "ours", num_ranks, train_iters=5)
    assert len(found.losses) == 5
    for name in ("lm loss", "grad norm"):
        assert found.series(name) == expected.series(name), name
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["grad_bytes"] > 0
    assert 0 < report["num_grad_micro_ops_between"] < report["num_grad_micro_ops"]
    assert "between all-to-alls and the others after the last" in "".join(found.outputs)


def test_different_comm_priority_on_one_rank_is_refused(token_data, tmp_path):
    from tests.ranks.pretraining import command_line

    arguments = command_line(token_data, [*EP2, "--train-iters", "2", "--lancet-num-chunks", "1", *PRIORITY])
    script = launch.REPO / "pretrain_gpt_moe.py"
    per_rank = [[], ["--lancet-grad-chunk-mb", "0.2"]]
    results = launch.run(script, arguments, 2, tmp_path, 60, per_rank=per_rank)
    assert [result.returncode for result in results] == [2, 2]
    for result in results:
        assert "grad_chunk_mb is 0.15 on rank 0, 0.2 on rank 1" in result.output.splitlines()[-1]
