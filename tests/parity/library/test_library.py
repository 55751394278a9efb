"""A program with its own training loop on two ranks: stock, and with the overlap; losses, gradients, weights."""

import json
import re

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.distributed
WORKER = launch.REPO / "tests/parity/library/library_worker.py"
NUM_STEPS = 3
PAIRS = {"num_chunks": 1, "pairing": "on"}
EXACT = {
    "one chunk": ({"num_chunks": 1}, "hook"),
    "pairs": (PAIRS, "hook"),
    "pairs, installed": (PAIRS, "install"),
    "pairs in a part of the model": (PAIRS, "nested"),
    "pairs of packed documents": (PAIRS, "packed"),
}
NEAR = {
    "two batch chunks": ({"num_chunks": 2}, "install"),
    "two sequence chunks": ({"num_chunks": 2, "chunk_dim": "sequence"}, "nested"),
    "pairs of two chunks, dedup": ({"num_chunks": 2, "pairing": "on", "dispatch": "dedup"}, "hook"),
}
TOLERANCE = 5e-6
"""Chunks sum in another order; the first step's gradients are within 2e-6, later weights differ by the optimizer's."""


def compared(settings, way, folder, **others):
    out = folder / "found.json"
    case = {"settings": settings, "way": way, **others}
    results = launch.run(WORKER, [json.dumps(case, default=str), out], 2, folder, timeout_s=150)
    launch.check(results)
    return json.loads(out.read_text()), results[0].output


@pytest.mark.parametrize("name", EXACT)
def test_overlap_changes_no_bit_without_cuts(name, tmp_path):
    found, output = compared(*EXACT[name], tmp_path)
    assert (found["loss"], found["gradient"], found["weight"]) == (0, 0, 0)
    assert found["num_steps"] == NUM_STEPS  # and not passes without gradients, nor steps of another model
    assert found["peak_dw_bytes"] > 0
    assert ("paired" in found["plan"]) == name.startswith("pairs")
    assert f"Megatron-Lancet plan: {found['line']}" in output
    assert "Megatron-Lancet report" in output


@pytest.mark.parametrize("name", NEAR)
def test_overlap_computes_what_stock_does_in_chunks(name, tmp_path):
    found, _ = compared(*NEAR[name], tmp_path)
    assert 0 < max(found["loss"], found["gradient"], found["weight"]) < TOLERANCE
    assert found["num_steps"] == NUM_STEPS
    # Forward and backward, there and back, chunks, micro-batches, layers.
    assert found["num_all_to_alls"] == 2 * 2 * 2 * 2 * 3


def test_overlap_cuts_packed_documents_along_the_sequence(tmp_path):
    # One step: Adam's weights differ more where a gradient is almost 0, as some of so few tokens are.
    found, _ = compared({"num_chunks": 2}, "packed", tmp_path, num_steps=1)
    assert 0 < found["gradient"] < TOLERANCE
    assert found["loss"] < TOLERANCE
    assert "dim=sequence" in found["plan"]


def test_overlap_without_a_plan_is_stock(tmp_path):
    found, output = compared({"plan": "off"}, "hook", tmp_path)
    assert (found["loss"], found["gradient"], found["weight"]) == (0, 0, 0)
    assert (found["num_steps"], found["plan"]) == (0, "off")
    assert "Megatron-Lancet plan: off: stock Megatron modules" in output


@pytest.mark.slow
def test_overlap_finds_its_plan_in_a_foreign_loop(tmp_path):
    few = {"dispatch": "plain", "pairing": "off", "attention": "stock"}
    settings = {"cache": "off", "report": tmp_path / "report", **few}
    found, output = compared(settings, "hook", tmp_path, num_steps=150)
    assert found["num_steps"] == 150
    assert "Megatron-Lancet plan: without overlap: " in output
    assert re.search(r"^  tuning +best of \d+, planned in ", output, re.M)
    assert (tmp_path / "report" / "plan.json").is_file()
    assert found["loss"] < 1e-3
