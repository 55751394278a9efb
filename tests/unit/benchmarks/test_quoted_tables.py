"""Tables in documents and beside result files are what the committed samples make of them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quoted
from benchmarks.network import summary as network_summary
from benchmarks.network import table as network_table
from benchmarks.prediction import errors as prediction_errors
from benchmarks.prediction import table as prediction_table
from benchmarks.priority import summary as priority_summary

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
