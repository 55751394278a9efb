"""The origin of results: marks of results without a commit, and the speed of the measuring machine."""

import json
import re

import pytest

from benchmarks import provenance
from benchmarks.harness import machine_speed, origin
from benchmarks.harness.machine_speed import Speed
from benchmarks.quoted.beside import RESULTS
from tests.unit.test_document_sources import RESULT, name_of
from tests.unit.test_documents import DOCUMENTS

PATHS = sorted(RESULTS.glob("*.json"))
LAST_MARKED_DAY = "2026-11-23"
LAST_DAY_WITHOUT_SPEED = "2026-11-24"
MOST_MARKED = 6
"""Results of the first three days. The number only falls, as results are measured again."""


def test_list_of_marked_results_is_closed():
    marked = provenance.marked()
    assert set(marked) <= {path.stem for path in PATHS}, "an entry for a missing file"
    assert len(marked) <= MOST_MARKED, "measure from a clean commit instead"
    for name, entry in marked.items():
        dates = (name[-len(LAST_MARKED_DAY) :], json.loads((RESULTS / f"{name}.json").read_text()).get("date", ""))
        assert max(dates) <= LAST_MARKED_DAY, f"{name}: measure from a clean commit instead"
        assert set(entry) == {"mark", "reason"}
        assert entry["reason"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_result_says_where_it_comes_from_or_is_marked(path):
    """Checks only the file; tests/cli checks that its commit is in the history."""
    result = json.loads(path.read_text())
    assert path.stem.endswith(result.get("date", "")), "the dates of name and file differ"
    commit = result.get("commit")
    due = provenance.due_mark(result, [] if commit is None else [commit])
    listed = provenance.marked().get(path.stem, {}).get("mark")
    assert listed == due or (commit is not None and listed == provenance.COMMIT_LOST)
    if due is None and result["date"] > LAST_DAY_WITHOUT_SPEED:
        assert {"gemm_gflops_after", "copy_gb_per_s_after", "is_disturbed"} <= set(result["machine_speed"])


HISTORY = ["aa11" * 10, "bb22" * 10]


@pytest.mark.parametrize(
    ("result", "mark"),
    [
        ({"commit": HISTORY[1], "is_dirty": False}, None),
        ({"commit": HISTORY[1][:7], "is_dirty": False}, None),
        ({"commit": HISTORY[0], "is_dirty": True}, "uncommitted changes"),
        ({"commit": "cc33" * 10, "is_dirty": False}, "commit lost"),
        ({"commit": None, "is_dirty": None}, "no commit"),
        ({}, "no commit"),
        ({"commit": HISTORY[1]}, "uncommitted changes"),
    ],
)
def test_result_that_no_commit_stands_for_is_due_a_mark(result, mark):
    assert provenance.due_mark(result, HISTORY) == mark


@pytest.fixture
def result_file(tmp_path):
    def write(name, **fields):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(fields))
        return path

    yield write
    provenance._changed_speed.cache_clear()


def test_link_to_a_result_is_followed_by_its_marks(result_file):
    lost = result_file("causes-again-2026-11-23")
    assert provenance.mark(lost) == " (commit lost)"
    assert provenance.mark(lost, is_disturbed=True) == " (commit lost) DISTURBED"
    assert provenance.mark(result_file("network-2026-12-01")) == ""
    assert (
        provenance.source(lost)
        == "Samples: [causes-again-2026-11-23.json](results/causes-again-2026-11-23.json) (commit lost)."
    )
    disturbed = result_file("network-2026-12-02", machine_speed={"is_disturbed": True})
    assert provenance.mark(disturbed) == " DISTURBED"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_places_that_quote_disturbed_results_say_so(document):
    for place in re.split(r"\n\s*\n|\n(?=\||#)", document.read_text()):
        marks = {name: provenance.mark(RESULTS / f"{name}.json") for name in RESULT.findall(place)}
        disturbed = [name for name, mark in marks.items() if provenance.DISTURBED in mark]
        assert not disturbed or "DISTURBED" in place, disturbed


def test_figure_of_several_results_has_the_marks_of_all():
    marks = ["", " (no commit) DISTURBED", " (commit lost)", " (no commit)"]
    assert provenance.together(marks) == " (commit lost) (no commit) DISTURBED"
    assert provenance.together(["", ""]) == ""


BEFORE = Speed(gemm_gflops=50.0, copy_gb_per_s=8.0)


@pytest.mark.parametrize(
    ("after", "change", "is_disturbed"),
    [
        (Speed(45.5, 8.0), 0.09, False),
        (Speed(44.5, 8.0), 0.11, True),
        (Speed(50.0, 8.88), 0.11, True),
        (Speed(25.0, 8.1), 0.5, True),
    ],
)
def test_machine_whose_speed_changes_is_disturbed(after, change, is_disturbed, monkeypatch):
    monkeypatch.setattr(machine_speed, "measured", lambda: after)
    started = {"date": "2026-12-01", "machine_speed": {"gemm_gflops": 50.0, "copy_gb_per_s": 8.0}}
    found = origin.finished(started)
    assert found == {
        "date": "2026-12-01",
        "machine_speed": {
            "gemm_gflops_before": 50.0,
            "gemm_gflops_after": after.gemm_gflops,
            "copy_gb_per_s_before": 8.0,
            "copy_gb_per_s_after": after.copy_gb_per_s,
            "change": pytest.approx(change),
            "is_disturbed": is_disturbed,
        },
    }
    assert ("DISTURBED" in machine_speed.described(found["machine_speed"])) is is_disturbed


def test_tables_begin_with_origin_and_machine_speed():
    found = {
        "command": "python -m benchmarks.network",
        "date": "2026-12-01",
        "commit": HISTORY[0],
        "is_dirty": True,
        "machine": {"cores": 2, "processor": "Some CPU"},
        "machine_speed": machine_speed.compared(BEFORE, Speed(49.0, 8.1)),
        "versions": {"torch": "2.13.0"},
        "settings": {"OMP_NUM_THREADS": "1"},
    }
    assert origin.first_lines(found).split("\n") == [
        "`python -m benchmarks.network`, 2026-12-01, commit aa11aa11aa11 with uncommitted changes, "
        "2 cores of Some CPU, torch 2.13.0, `OMP_NUM_THREADS=1`",
        "",
        "Speed of one thread: a GEMM with 50.0 GFLOP/s at the start and 49.0 at the end, a copy with 8.0 GB/s at the "
        "start and 8.1 at the end.",
    ]
    assert origin.first_lines(found).split("\n")[0] == origin.described(found)
