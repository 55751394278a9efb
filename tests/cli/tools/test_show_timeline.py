import importlib.util
import json
from pathlib import Path

import pytest

from megatron_lancet.errors import UsageError
from megatron_lancet.report.timeline.timeline_file import write_timelines
from tests.unit.report import steps

TOOL = Path(__file__).resolve().parents[3] / "tools" / "show_timeline.py"


@pytest.fixture(scope="module")
def main():
    spec = importlib.util.spec_from_file_location("tool_show_timeline", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def timelines(tmp_path):
    path = tmp_path / "timeline.json"
    write_timelines(steps.record(), path)
    return path


def test_page_and_trace_are_written_beside_the_file_or_where_asked(main, timelines, tmp_path, capsys):
    main([str(timelines)])
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.json", "timeline.html", "trace.json"}
    main([str(timelines), "--output", str(tmp_path / "new" / "folder")])
    assert (tmp_path / "new" / "folder" / "timeline.html").read_text() == (tmp_path / "timeline.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert capsys.readouterr().out.count("written to ") == 4


def test_what_is_no_timeline_is_one_message(main, timelines, tmp_path):
    timelines.write_text("{}")
    with pytest.raises(UsageError, match=r"these are no timelines: .*expected version 1"):
        main([str(timelines)])
    with pytest.raises(UsageError, match=r"missing\.json"):
        main([str(tmp_path / "missing.json")])


def test_a_folder_that_cannot_be_made_is_one_message(main, timelines):
    with pytest.raises(UsageError, match=r"can't write into .*name another folder"):
        main([str(timelines), "--output", str(timelines / "below")])
