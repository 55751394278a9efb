"""The sentence of docs/performance.md about the demo matches the committed result file."""

import copy
import json
import re
from typing import Any

import pytest

from benchmarks.demo.steps import Comparison
from docs.demo_figures import PAGE, newest, record, sentence, with_figures
from megatron_lancet.errors import UsageError


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """The committed result that the page quotes."""
    return json.loads(newest().read_text())


def test_page_quotes_the_committed_demo(result):
    text = PAGE.read_text()
    assert with_figures(text, result) == text, "run python docs/demo_figures.py"


def test_committed_demo_is_made_of_its_samples(result):
    made = Comparison.read(result).summary()
    assert made == {key: result[key] for key in made}
    assert result["num_measured_steps"] >= 16
    assert result["wanted_share"] is not None
    assert {"command", "date", "commit", "is_dirty", "machine", "versions", "settings"} <= result.keys()
    assert newest().stem == f"demo-{result['date']}"


def test_a_changed_figure_is_written_anew(result):
    text = PAGE.read_text()
    faster = {**result, "speedup": 9.87}
    assert "9.87x faster" in with_figures(text, faster)
    assert with_figures(with_figures(text, faster), result) == text
    with pytest.raises(ValueError, match="the page has 0 places for the demo's sentence"):
        with_figures("no place", result)


def test_disturbed_run_is_marked_in_the_sentence(result):
    steady, slower = ({**result["machine_speed"], "is_disturbed": changed, "change": 0.2} for changed in (False, True))
    quiet = {**result, "other_load": None, "machine_speed": steady}
    assert "DISTURBED" not in sentence(quiet)
    for disturbed, words in (
        ({**quiet, "other_load": "4.0% used by others"}, r"DISTURBED: 4\.0%"),
        ({**quiet, "machine_speed": slower}, r"DISTURBED: the machine's speed changed by 20%"),
    ):
        assert re.search(words, sentence(disturbed))


def test_run_is_recorded_under_its_date(result, tmp_path):
    run, results, picture = tmp_path / "run", tmp_path / "results", tmp_path / "picture.png"
    for folder in (run, results):
        folder.mkdir()
    summary = copy.deepcopy(result)
    names = ("command", "date", "commit", "is_dirty", "machine", "versions", "settings")
    summary["origin"] = {name: summary.pop(name) for name in names} | {"date": "2031-02-03"}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "steps.png").write_bytes(b"a picture")
    path = record(run / "summary.json", results, picture)
    assert path == newest(results) == results / "demo-2031-02-03.json"
    assert json.loads(path.read_text()) == {**result, "date": "2031-02-03"}
    assert picture.read_bytes() == b"a picture"
    (run / "summary.json").write_text(json.dumps({"iterations": 500}))
    with pytest.raises(UsageError, match="has no samples: it is from the long demo"):
        record(run, results, picture)
    with pytest.raises(UsageError, match=r"expected summary\.json of the short demo"):
        record(tmp_path / "nothing", results, picture)
