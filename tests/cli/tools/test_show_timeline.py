import pytest

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.views.html import page
from megatron_lancet.lab.views.trace_file import read_trace, write_trace
from tests.cli.loading import load_tool
from tests.unit.report import steps


@pytest.fixture(scope="module")
def main():
    return load_tool("traces/show_timeline").main


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(steps.record(), path)
    return path


def test_timeline_page_is_written_beside_the_trace_or_elsewhere(main, trace, tmp_path, capsys):
    main([str(trace)])
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.html", "trace.json"}
    main([str(trace), "--output", str(tmp_path / "new" / "folder")])
    assert (tmp_path / "new" / "folder" / "timeline.html").read_text() == (tmp_path / "timeline.html").read_text()
    assert (tmp_path / "timeline.html").read_text() == page(read_trace(trace))
    assert capsys.readouterr().out.count("written to ") == 2


def test_rank_traces_are_written_into_a_folder_of_their_own(main, trace, tmp_path):
    main([str(trace), "--rank-traces", str(tmp_path / "hta")])
    ranks = [timeline.rank for timeline in read_trace(trace).measured]
    assert {path.name for path in (tmp_path / "hta").iterdir()} == {f"rank-{rank}.json" for rank in ranks}
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="name another folder with --rank-traces"):
        main([str(trace), "--rank-traces", str(tmp_path / "file")])


def test_show_timeline_refuses_other_files_with_one_message(main, trace, tmp_path):
    trace.write_text("{}")
    with pytest.raises(UsageError, match=r"this is not the trace of a run: .*expected a trace with traceEvents"):
        main([str(trace)])
    with pytest.raises(UsageError, match=r"missing\.json"):
        main([str(tmp_path / "missing.json")])


def test_show_timeline_refuses_an_impossible_folder(main, trace):
    with pytest.raises(UsageError, match=r"can't write into .*name another folder"):
        main([str(trace), "--output", str(trace / "below")])
