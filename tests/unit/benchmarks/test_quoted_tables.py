"""Tables in documents and beside result files are what the committed samples make of them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quoted, quoted_results
from benchmarks.network import summary as network_summary
from benchmarks.network import table as network_table
from benchmarks.prediction import errors as prediction_errors
from benchmarks.prediction import table as prediction_table
from benchmarks.priority import summary as priority_summary
from megatron_lancet.files import to_plain
from megatron_lancet.schedule.plan import fixed_plan, paired

RESULTS = Path(quoted.__file__).parent / "results"
MAKERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "network": (network_summary.summarise, network_table.as_markdown),
    "prediction": (prediction_errors.compare, prediction_table.as_markdown),
    "priority": (priority_summary.summarise, priority_summary.as_markdown),
}


def rows(markdown: str) -> list[str]:
    """Lines of tables without their rules."""
    return [line for line in markdown.splitlines() if line.startswith("|") and not re.fullmatch(r"[|\- ]+", line)]


@pytest.mark.parametrize("document", quoted.DOCUMENTS, ids=lambda path: path.name)
def test_tables_of_documents_are_made_from_committed_results(document):
    text = document.read_text()
    assert "<!-- quoted: " in text
    assert quoted.with_tables(text) == text, "python -m benchmarks.quoted writes the tables anew"


def test_every_table_is_quoted_once():
    names = [name for document in quoted.DOCUMENTS for name in re.findall(r"quoted: ([\w-]+)", document.read_text())]
    assert sorted(names) == sorted(quoted.TABLES)


def test_a_changed_figure_is_written_anew():
    text = "before\n<!-- quoted: transport -->\n| 0 ms | 9.99 |\n<!-- end -->\nafter\n"
    made = quoted.with_tables(text)
    assert "9.99" not in made
    assert made.startswith("before\n<!-- quoted: transport -->\n| rank 1 is late by |")
    assert made.endswith("\n<!-- end -->\nafter\n")


@pytest.fixture
def results_with_pairs(tmp_path, monkeypatch):
    """The committed results and two more, in which other cases' samples stand for those of steps with pairs."""

    def cached():
        for function in (quoted_results.result, quoted_results.newest, quoted_results._summaries):
            function.cache_clear()

    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.setattr(quoted_results, "_RESULTS", tmp_path)
    cached()
    network = quoted.network()["45-accumulated"][0].case
    renamed = {"all-k4": "paired-k1"}
    network["name"], network["variants"] = "45-m4", [renamed.get(name, name) for name in network["variants"]]
    for by_variant in (network["peak_activation_bytes"], *(sweep["samples"] for sweep in network["sweeps"])):
        by_variant["paired-k1"] = by_variant.pop("all-k4")
    (prediction,) = (found.case for found, _ in quoted.predictions(with_pairs=False) if found.case["name"] == "45")
    prediction["name"], prediction["plans"]["stack-k2"] = "45-m4", to_plain(paired(fixed_plan(2)))
    for name, case in (("network-2026-12-01", network), ("prediction-2026-12-01", prediction)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"date": "2026-12-01", "cases": [case]}))
    cached()
    yield
    cached()


@pytest.mark.usefixtures("results_with_pairs")
def test_results_with_pairs_get_tables_of_their_own():
    (row,) = (line for line in quoted.pairing().splitlines() if "[2026-12-01](" in line)
    assert row.startswith("| `45-m4` | 42.5% | (1.91) | 1.67 (1.15) | 1.68 (1.12) | ")
    first = "| [`45-m4`](results/network-2026-12-01.json) | "
    variants = [line for line in quoted.pairing_variants().splitlines() if line.startswith(first)]
    assert [line.removeprefix(first).split("`")[1] for line in variants] == [
        "stock",
        "megatron-overlap",
        "all-k2",
        "paired-k1",
    ]
    predicted = quoted.pairing_prediction()
    assert "[`45-m4`](results/prediction-2026-12-01.json) DISTURBED | `stack-k2` |" in predicted
    assert "\n1 configurations with pairing: error of the step time median" in predicted
    assert "over the fastest configuration's (wanted: at most 1.02): `45-m4` 1." in predicted


@pytest.mark.usefixtures("results_with_pairs")
def test_results_with_pairs_enter_no_other_table():
    pairs = [name for name in quoted.TABLES if name.startswith("pairing")]
    for document in quoted.DOCUMENTS:
        text = document.read_text()
        for name in pairs:
            text = re.sub(rf"<!-- quoted: {name} -->\n.*?\n<!-- end -->", "", text, flags=re.DOTALL)
        assert quoted.with_tables(text) == text


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_tables_beside_results_are_made_from_their_samples(path):
    summarise, as_markdown = MAKERS[path.name.partition("-")[0]]
    cases = json.loads(path.with_suffix(".json").read_text())["cases"]
    expected = rows(as_markdown([summarise(case) for case in cases]))
    assert expected
    assert rows(path.read_text()) == expected


def test_figures_that_miss_what_was_wanted_are_listed_with_their_mark():
    found = [quoted.Figure("`45` k=2", 0.854, False), quoted.Figure("`45` k=4", 0.937, True, " DISTURBED")]
    assert quoted._line("92 %", found, "{:.1%}".format) == ["92 %", "1 of 2", "`45` k=2 85.4%", "93.7% DISTURBED"]
