import json

import pytest

from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.views.trace_file import read_trace, write_trace
from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

RECORD = TimelineRecord(
    title="tést </script>",
    measured=(
        RankTimeline(
            0,
            (
                Span("L1.c0.F.attention", Lane.COMPUTE, 0.0, 1.25),
                Span("L1.c0.F.dispatch", Lane.COMM, 1.25, 3.5, 4096),
                Span("L1.c0.F.dispatch", Lane.WAIT, 1.5, 3.5),
            ),
            4.0,
        ),
        RankTimeline(1, (), 4.5),
    ),
    predicted=(RankTimeline(0, (Span("F.head", Lane.COMPUTE, 0.0, 1.0),), 1.0),),
    before=(RankTimeline(0, (Span("L1.c0.F.dispatch", Lane.WAIT, 0.5, 3.5),), 5.0),),
    ep_groups=((0, 1),),
    reasons={"L1.c0.F.dispatch": "nothing left to run"},
)


def test_trace_file_is_read_as_written(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(RECORD, path)
    assert read_trace(path) == RECORD
    assert [part.name for part in tmp_path.iterdir()] == ["trace.json"]


def first_slice(content):
    return next(event for event in content["traceEvents"] if event["ph"] == "X")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["otherData"].update(version=2), "expected version 1 .* found 2"),
        (lambda content: content["otherData"].pop("version"), "expected version 1 .* found None"),
        (lambda content: first_slice(content).pop("dur"), "field 'dur' is missing"),
        (lambda content: first_slice(content).update(dur=-1), r"traceEvents\[\d+\].dur: expected 0 to \d+, found -1"),
        (lambda content: first_slice(content)["args"].update(lane="gpu"), "expected one of compute, wait, comm"),
        (lambda content: first_slice(content).update(pid=7), "expected each process of the events once"),
        (lambda content: content["traceEvents"].append(3), r"traceEvents\[\d+\]: expected an object, found 3"),
        (lambda content: content["otherData"]["measured"][1].update(pid=0), "expected each process of the events once"),
        (lambda content: content["otherData"].pop("title"), "field 'title' is missing"),
        (lambda content: content["otherData"].update(more=1), "unknown field 'more'"),
        (lambda content: first_slice(content)["args"].pop("lane"), "field 'lane' is missing"),
    ],
)
def test_damaged_trace_file_is_refused_with_its_place(tmp_path, change, message):
    path = tmp_path / "trace.json"
    write_trace(RECORD, path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=message):
        read_trace(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "\ud800"])
def test_trace_reader_refuses_other_files(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(RecordError):
        read_trace(path)
    with pytest.raises(RecordError):
        read_trace(tmp_path / "missing.json")
