"""Tables in documents and next to result files are what the committed samples make of them."""

import copy
import dataclasses
import json
import re
from typing import Any

import pytest

from benchmarks import provenance
from benchmarks.network.cases import CASES, VARIANTS
from benchmarks.quoted import beside
from benchmarks.quoted import network as quoted_network
from benchmarks.quoted import results as quoted_results
from benchmarks.quoted import tables as quoted
from benchmarks.quoted.beside import RESULTS
from megatron_lancet.files.records import to_plain
from megatron_lancet.schedule.plan import fixed_plan, paired


@pytest.mark.parametrize("document", quoted.DOCUMENTS, ids=lambda path: path.name)
def test_tables_of_documents_are_made_from_committed_results(document):
    text = document.read_text()
    assert "<!-- quoted: " in text
    assert quoted.with_tables(text) == text, "python -m benchmarks.quoted writes the tables anew"


def test_every_table_is_quoted_once():
    names = [name for document in quoted.DOCUMENTS for name in re.findall(r"quoted: ([\w-]+)", document.read_text())]
    assert sorted(names) == sorted(quoted.TABLES)


def test_a_changed_figure_is_written_anew():
    text = "before\n<!-- quoted: transport -->\n9.99 ms\n<!-- end -->\nafter\n"
    made = quoted.with_tables(text)
    assert "9.99" not in made
    assert made.startswith("before\n<!-- quoted: transport -->\nBy gloo and by sender: ")
    assert made.endswith("\n<!-- end -->\nafter\n")


@pytest.fixture
def further_results(tmp_path, monkeypatch):
    """The committed results and more, in which other cases' samples stand for those of pairs, of top-4 and of nodes."""

    def cached():
        for function in (quoted_results.result, quoted_results.all_runs, quoted_network._runs):
            function.cache_clear()

    for path in RESULTS.glob("*.json"):
        # These tables have the rows of the test only.
        if not {"pairing", "dispatch", "nodes"} & set(path.stem.split("-")):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.setattr(quoted_results, "_RESULTS", tmp_path)
    cached()
    measured = quoted_results.newest("network")
    (accumulated,) = (
        run.case
        for run in quoted_results.all_runs("network")
        if (run.file, run.case["name"]) == ("network-2026-11-22.json", "45-accumulated")
    )
    pairs = with_variant(accumulated, "45-m4", "paired-k1")
    top_4 = with_variant(measured["20"].case, "65-top4", "dedup-k2")
    count_bytes(top_4)
    nodes = with_variant(measured["20"].case, "nodes-top4", "two-hop-k2")
    count_bytes(nodes)
    (prediction,) = (found.case for found, _ in quoted.predictions() if found.case["name"] == "45")
    predicted_pairs = {**prediction, "name": "45-m4", "plans": {**prediction["plans"]}}
    predicted_pairs["plans"]["stack-k2"] = to_plain(paired(fixed_plan(2)))
    memory = quoted.result("activation-memory")
    top_4_mb = {"plain": {"off": 100.0, "k=1": 150.0}, "dedup": {"k=1": 104.0}}
    own = ("65-top4", "unshaped-nodes-top4")
    for name, found in (
        ("network-2026-12-01", {"cases": [pairs, top_4, nodes]}),
        ("prediction-2026-12-01", {"cases": [predicted_pairs, *({**prediction, "name": name} for name in own)]}),
        ("activation-memory-2026-12-01", {**memory, "top_4_peak_mb": top_4_mb}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({"date": "2026-12-01", **found}))
    cached()
    yield
    cached()


def with_variant(found: dict[str, Any], name: str, variant: str) -> dict[str, Any]:
    """Returns a copy of the samples as case ``name``, with ``variant`` instead of four chunks."""
    case = copy.deepcopy(found)
    case["variants"] = [variant if one == "all-k4" else one for one in case["variants"]]
    for by_variant in (case["peak_activation_bytes"], *(sweep["samples"] for sweep in case["sweeps"])):
        by_variant[variant] = by_variant.pop("all-k4")
    case["plans"] = {one: VARIANTS[one].schedule for one in case["variants"]}
    of_case = dataclasses.asdict(CASES[name])
    return {**case, **{field: of_case[field] for field in of_case if field not in ("variants", "title")}}


def count_bytes(case: dict[str, Any]) -> None:
    """As a run of today does: half of stock's bytes without duplicates."""
    case["sent_rows"] = {"tokens": 1000, "plain": 2000, "dedup": 990, "two_hop": 990}
    case["sample_fields"] = [*case["sample_fields"], "wire_bytes"]
    for sweep in case["sweeps"]:
        for name, repeats in sweep["samples"].items():
            for ranks in repeats:
                for rank in ranks:
                    rank.append(10e6 if name in ("dedup-k2", "two-hop-k2") else 20e6)


@pytest.mark.usefixtures("further_results")
def test_results_without_duplicates_get_tables_of_their_own():
    (line,) = quoted.dispatch().splitlines()[2:]
    start, *cells = line.split(" | ")
    assert start == "| `65-top4`"
    assert cells[1:3] == ["2.02", "2.000 (-1.0%)"]
    assert cells[3].startswith("`all-k2` 1.")
    assert cells[4].startswith("`dedup-k2` 1.")
    variants = [line.split(" | ") for line in quoted.dispatch_variants().splitlines()[2:]]
    assert [(cells[1], *cells[5:7]) for cells in variants if cells[1] in ("`all-k2`", "`dedup-k2`")] == [
        ("`all-k2`", "20.00 MB", ""),
        ("`dedup-k2`", "10.00 MB", "2.000 (-1.0%)"),
    ]
    (row,) = (line for line in quoted.dispatch_prediction().splitlines() if "[`65-top4`](results/" in line)
    assert row.startswith("| [`65-top4`](results/prediction-2026-12-01.json) DISTURBED | ")
    samples = "[samples](results/activation-memory-2026-12-01.json)"
    assert quoted.dispatch_memory() == f"k=1 1.50 plain, 1.04 dedup ({samples})."


@pytest.mark.usefixtures("further_results")
def test_results_of_two_nodes_get_tables_of_their_own():
    (line,) = quoted.nodes().splitlines()[2:]
    start, _, *cells = line.split(" | ")
    assert start == "| `nodes-top4`"
    assert cells[:2] == ["2.00, to a rank once 0.99, to a node once 0.99", "2.000 (-1.0%)"]
    assert cells[4].startswith("`two-hop-k2` 1.")
    variants = [line.split(" | ") for line in quoted.nodes_variants().splitlines()[2:]]
    (two_hop,) = (cells for cells in variants if cells[1] == "`two-hop-k2`")
    assert two_hop[5:7] == ["10.00 MB", "2.000 (-1.0%)"]
    assert two_hop[8] == cells[2], "against the same chunks"
    assert quoted.nodes_prediction().endswith(
        "\n\nDispatch of the planner's choice: `unshaped-nodes-top4` plain DISTURBED."
    )


@pytest.mark.usefixtures("further_results")
def test_results_with_pairs_get_tables_of_their_own():
    (row,) = (line for line in quoted.pairing().splitlines() if "[2026-12-01](" in line)
    cells = row.strip("| ").split(" | ")
    assert cells[:3] == ["`45-m4`", "42.5%", "(bound 1.91)"]
    assert cells[3] == "1.10 (bound 1.73, memory 1.32)"
    assert "1.67 (bound 1.15, memory 1.03)" in cells
    predicted = quoted.pairing_prediction()
    (row,) = (
        line
        for line in predicted.splitlines()
        if "[`45-m4`](results/prediction-2026-12-01.json) DISTURBED | 1 |" in line
    )
    assert "(`stack-k2`)" in row
    assert row.endswith(" (fastest: `sequence-k2-dw`) |")
    assert "\n1 configurations with pairing: error of the step time median" in predicted
    assert predicted.endswith("Target for the planner's choice: at most 1.02.")


@pytest.mark.usefixtures("further_results")
def test_empty_place_gets_its_table_and_no_more():
    text = "<!-- quoted: auto-sentence -->\n<!-- end -->\nkept\n<!-- quoted: auto -->\nold\n<!-- end -->\n"
    assert "<!-- end -->\nkept\n<!-- quoted: auto -->" in quoted.with_tables(text)


def test_results_with_tables_of_their_own_enter_no_other():
    # The tables of targets and of the front page combine several benchmarks.
    own = [name for name in quoted.TABLES if name.startswith(("pairing", "dispatch", "nodes", "targets", "headline"))]
    for document in quoted.DOCUMENTS:
        text = document.read_text()
        for name in own:
            text = re.sub(rf"<!-- quoted: {name} -->\n.*?\n<!-- end -->", "", text, flags=re.DOTALL)
        # The newer file of activation memory only adds figures of top-4, which have their own table.
        made = quoted.with_tables(text)
        assert made.replace("activation-memory-2026-12-01", "activation-memory-2026-11-30") == text


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted(RESULTS.glob("*.json"))
        if path.name.partition("-")[0] in beside.MAKERS and "cases" in json.loads(path.read_text())
    ],
    ids=lambda path: path.stem,
)
def test_each_result_has_tables_and_they_are_those_beside_it(path):
    made = beside.made(path)
    result = json.loads(path.read_text())
    assert f", {result['date']}, " in made.split("\n")[0]
    assert "\n|---|" in made
    assert all(case["name"] in made for case in result["cases"])
    if path.with_suffix(".md").exists():
        assert path.with_suffix(".md").read_text() == made, "run python -m benchmarks.quoted"


def test_figures_that_miss_their_target_are_listed():
    found = [quoted.Figure("`45` k=2", 0.854, False), quoted.Figure("`45` k=4", 0.937, True, " DISTURBED")]
    assert quoted.target_row("92 %", found, "{:.1%}".format) == ["92 %", "1 of 2", "`45` k=2 85.4%", "93.7% DISTURBED"]


def test_every_benchmark_with_targets_has_rows_in_their_table():
    rows_of_targets = quoted.targets().splitlines()[2:]
    for words in (
        *("waits cut", "pairs:", "fewer bytes", "two hops", "tiles", "placed experts", "predicted steps of two"),
        *("the planner's choice", "injected causes", "balanced bins", "a profile from traces", "comm-priority"),
    ):
        found = [row for row in rows_of_targets if words in row]
        assert found, words
    assert all(re.search(r"\| \d+ of [1-9]\d* \|", row) for row in rows_of_targets)


def test_tables_and_targets_of_disturbed_results_are_marked(monkeypatch):
    monkeypatch.setattr(provenance, "_changed_speed", lambda path: True)
    assert [name for name, table in quoted.TABLES.items() if provenance.DISTURBED not in table()] == []
    assert [row for row in quoted.targets().splitlines()[2:] if provenance.DISTURBED not in row] == []
    assert quoted.host_time().count(f"){provenance.DISTURBED}") == 3  # local layers, Transformer Engine's, a device
