"""Megatron-Bridge's own trainings on CPU ranks, with one line for the overlap: losses and weights are stock's."""

import json
import re

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.bridge import processes
from tests.ranks import launch

pytestmark = [pytest.mark.distributed, processes.NEEDS_BRIDGE]
WORKER = launch.REPO / "tests/bridge/bridge_worker.py"
TOLERANCE = 2e-6
"""Relative: chunks sum in another order."""
ONE_CHUNK, CHUNKS = {"num_chunks": 1}, {"num_chunks": 2}
PAIRS = {**ONE_CHUNK, "pairing": "on"}
EXACT = {
    "one chunk": "stock",
    "pairs": "stock",
    "images, pairs": "images",
    "packed, one chunk": "packed",
    "packed, pairs": "packed",
    "adapters, pairs": "adapters",
}
NEAR = {"chunks": "stock", "images, chunks": "images", "packed, chunks": "packed", "adapters, chunks": "adapters"}
RESUMED = ["pairs from pairs", "pairs from stock", "stock from pairs"]
WHAT_IS_EQUAL = ["steps", "evaluations", "weights", "spread"]


def trained(cases, num_ranks, folder):
    """Results of each case, and the output of the ranks."""
    out = folder / "found.json"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    words = [*launcher, "--master-port", launch.free_port(), WORKER, json.dumps(cases), out]
    printed = processes.run(*words, timeout_s=400)
    parts = re.split(r"^case: (.*)$", printed, flags=re.M)
    output = dict.fromkeys(cases, "")
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        output[name] += text
    return {name: {**one, "output": output[name]} for name, one in json.loads(out.read_text()).items()}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bridge")
    weights, ours = str(folder / "stock"), str(folder / "pairs")
    begins = {"weights": weights, "num_steps": 2}
    cases = {
        "stock": {"num_steps": 4, "save": weights},
        "pairs": {"num_steps": 4, "save": ours, "settings": PAIRS},
        "one chunk": {"num_steps": 4, "settings": ONE_CHUNK},
        "chunks": {"num_steps": 4, "settings": CHUNKS},
        "off": {"num_steps": 2, "settings": {"plan": "off"}},
        "pairs from pairs": {"num_steps": 4, "load": ours, "settings": PAIRS},
        "pairs from stock": {"num_steps": 4, "load": weights, "settings": PAIRS},
        "stock from pairs": {"num_steps": 4, "load": ours},
        "tuned from stock": {"num_steps": 4, "load": weights, "exits_at": 8, "settings": {"num_steps": 1000}},
        "exit": {"num_steps": 4, "exits_at": 2, "settings": PAIRS},
        "failure": {"num_steps": 4, "fails_at": 1, "settings": PAIRS},
        "failure, then stock": {"num_steps": 4, "fails_at": 1, "settings": PAIRS, "then_stock": True},
        "pairs, then stock": {"num_steps": 4, "settings": PAIRS, "then_stock": True},
        "images": {"num_steps": 2, "images": True},
        "images, pairs": {"num_steps": 2, "images": True, "settings": PAIRS},
        "images, chunks": {"num_steps": 2, "images": True, "settings": CHUNKS},
        "packed": {**begins, "packed": True},
        "packed, one chunk": {**begins, "packed": True, "settings": ONE_CHUNK},
        "packed, pairs": {**begins, "packed": True, "settings": PAIRS},
        "packed, chunks": {**begins, "packed": True, "settings": CHUNKS},
        "adapters": {**begins, "lora": True},
        "adapters, pairs": {**begins, "lora": True, "settings": PAIRS},
        "adapters, chunks": {**begins, "lora": True, "settings": CHUNKS},
    }
    return {**trained(cases, 2, folder), "folders": (weights, ours)}


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory):
    virtual = {"num_steps": 2, "virtual": True}
    settings = {"one chunk": ONE_CHUNK, "pairs": PAIRS}
    cases = {"stock": virtual} | {name: {**virtual, "settings": one} for name, one in settings.items()}
    return trained(cases, 4, tmp_path_factory.mktemp("bridge"))


def assert_equal(found, stock):
    assert {name: found[name] for name in WHAT_IS_EQUAL} == {name: stock[name] for name in WHAT_IS_EQUAL}
    assert all(list(step) == ["lm loss", "norm"] for step in stock["steps"])


def worst_of(found, expected):
    pairs = [pair for kind in ("steps", "evaluations") for pair in zip(found[kind], expected[kind], strict=True)]
    return max(abs(one[name] / other[name] - 1) for one, other in pairs for name in other)


@pytest.mark.parametrize("name", EXACT)
def test_bridge_trains_as_stock_to_the_bit(on_two_ranks, name):
    found, stock = on_two_ranks[name], on_two_ranks[EXACT[name]]
    assert_equal(found, stock)
    assert found["num_steps"] == len(found["steps"]) > 1  # evaluations, which lie between them, do not count
    assert len(found["evaluations"]) == len(found["steps"]) // 2 + 1
    assert ("paired" in found["plan"]) == ("pairs" in name)
    assert f"Megatron-Lancet plan: {found['line']}" in found["output"]
    assert "Megatron-Lancet report" in found["output"]


@pytest.mark.parametrize("name", NEAR)
def test_bridge_trains_as_stock_in_chunks(on_two_ranks, name):
    found, stock = on_two_ranks[name], on_two_ranks[NEAR[name]]
    assert worst_of(found, stock) < TOLERANCE
    assert found["weights"] != stock["weights"]
    assert "chunks=2" in found["plan"]
    assert ("dim=sequence" in found["plan"]) == name.startswith("packed")


def test_bridge_off_is_stock(on_two_ranks):
    found, stock = on_two_ranks["off"], on_two_ranks["stock"]
    assert found["steps"] == stock["steps"][:2]
    assert (found["num_steps"], found["plan"]) == (0, "off")


@pytest.mark.parametrize("name", RESUMED)
def test_bridge_resumes_as_without_a_stop(on_two_ranks, name):
    found, stock = on_two_ranks[name], on_two_ranks["stock"]
    assert found["steps"] == stock["steps"][2:]
    assert (found["evaluations"], found["weights"]) == (stock["evaluations"][1:], stock["weights"])


def test_tuning_knows_where_a_resumed_training_is(on_two_ranks):
    assert "(fixed, because 6 steps are too few to find one" in on_two_ranks["tuned from stock"]["output"]


def test_bridge_reports_at_an_exit_but_not_after_a_failure(on_two_ranks):
    stock = on_two_ranks["stock"]["steps"]
    assert (on_two_ranks["exit"]["steps"], on_two_ranks["failure"]["steps"]) == (stock[:2], stock[:1])
    assert on_two_ranks["exit"]["output"].count("Megatron-Lancet report") == 1
    assert "Megatron-Lancet report" not in on_two_ranks["failure"]["output"]


@pytest.mark.parametrize("name", ["pairs", "failure"])
def test_bridge_trains_stock_by_the_same_configuration(on_two_ranks, name):
    found, stock = on_two_ranks[f"{name}, then stock"], on_two_ranks["stock"]
    assert (found["steps"], found["weights"]) == (stock["steps"], stock["weights"])
    assert found["output"].count("Megatron-Lancet plan: ") == 1


def test_bridge_saves_the_names_of_stock(on_two_ranks):
    stock, ours = (
        FileSystemReader(f"{folder}/iter_0000004").read_metadata().state_dict_metadata
        for folder in on_two_ranks["folders"]
    )
    assert len(stock) > 50
    assert ours.keys() == stock.keys()


@pytest.mark.parametrize("name", ["one chunk", "pairs"])
def test_bridge_trains_virtual_stages_to_the_bit(on_four_ranks, name):
    found, stock = on_four_ranks[name], on_four_ranks["stock"]
    assert_equal(found, stock)
    assert found["num_steps"] == len(found["steps"]) == 2
    assert ("paired" in found["plan"]) == (name == "pairs")
