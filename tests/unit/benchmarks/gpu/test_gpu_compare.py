"""Predicted next to measured: errors, hidden shares, and what is missing."""

import pytest

from benchmarks.gpu.check.compare import rows, table

LINK = "10:350"


def predicted(modelled, simulated=None):
    found = {"modelled": {"step_ms": modelled, "exposed_ms": 4.0, "kernels": 7}}
    return {LINK: found | ({"simulated": {"step_ms": simulated, "exposed_ms": 2.0}} if simulated else {})}


PREDICTION = {
    "variants": {
        "stock": predicted(150.0, 160.0),
        "pairs": predicted(120.0, 120.0),
        "other": predicted(140.0),
        "ideal": predicted(110.0, 120.0),
    }
}
MEASURED = {
    "stock": {LINK: {"step_ms": 200.0, "exposed_ms": 50.0}},
    "pairs": {LINK: {"step_ms": 160.0, "exposed_ms": None}},
    "ideal": {LINK: {"step_ms": 150.0, "exposed_ms": 0.0}},
    "unforeseen": {LINK: {"step_ms": 175.0, "exposed_ms": 1.0}},
}


def by_variant(measured):
    return {row.variant: row for row in rows(PREDICTION, measured)}


def test_errors_are_relative_to_what_was_measured():
    pairs = by_variant(MEASURED)["pairs"]
    assert pairs.step_ms.measured == 160.0
    assert pairs.step_ms.error("modelled") == pytest.approx(-0.25)
    assert pairs.exposed_ms.error("modelled") is None
    assert by_variant(MEASURED)["ideal"].exposed_ms.error("modelled") is None  # of 0 ms every error is infinite


def test_hidden_share_lies_between_stock_and_ideal():
    found = by_variant(MEASURED)
    assert found["pairs"].hidden.measured == pytest.approx(40 / 50)
    assert found["pairs"].hidden.predicted == pytest.approx({"modelled": 30 / 40, "simulated": 1.0})
    assert found["other"].hidden.predicted == pytest.approx({"modelled": 10 / 40})
    assert found["unforeseen"].hidden.measured == pytest.approx(0.5)
    assert found["stock"].hidden.measured is None
    assert found["stock"].hidden.predicted == {}


def test_without_ideal_no_share_was_measured():
    without = {name: figures for name, figures in MEASURED.items() if name != "ideal"}
    assert by_variant(without)["pairs"].hidden.measured is None


def test_table_has_predictions_without_measurements():
    assert {row.variant for row in rows(PREDICTION, {})} == set(PREDICTION["variants"])
    lines = table(PREDICTION, MEASURED).splitlines()
    assert len(lines) == 2 + 5
    assert lines[3] == (
        "| 10:350 | pairs | 160.0 | 120.0 (-25 %) | 120.0 (-25 %) |  | 4.0 | 2.0 | 80 % | 75 % | 100 % |"
    )
    assert {line.count("|") for line in lines} == {12}
