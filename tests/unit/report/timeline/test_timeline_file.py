import json

import pytest

from megatron_lancet.files import RecordError
from megatron_lancet.report.timeline.timeline_file import TimelineRecord, read_timelines, write_timelines
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
    ep_groups=((0, 1),),
    reasons={"L1.c0.F.dispatch": "nothing left to run"},
)


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "timeline.json"
    write_timelines(RECORD, path)
    assert read_timelines(path) == RECORD
    assert [part.name for part in tmp_path.iterdir()] == ["timeline.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(version=2), "expected version 1 .* found 2"),
        (lambda content: content["measured"][0]["name"].pop(), "columns of rank 0 differ in length"),
        (
            lambda content: content["measured"][0]["name"].__setitem__(0, 99),
            r"measured\[0\].name: .* below 3, found 99",
        ),
        (
            lambda content: content["measured"][0]["end_ms"].__setitem__(1, 0.5),
            "span 1 of rank 0 ends before it starts",
        ),
        (lambda content: content["measured"][0]["lane"].__setitem__(0, "gpu"), "expected one of compute, wait, comm"),
        (lambda content: content["measured"][1].update(rank=0), "a rank stands there twice"),
        (lambda content: content.pop("title"), "field 'title' is missing"),
        (lambda content: content.update(more=1), "unknown field 'more'"),
    ],
)
def test_what_is_no_timeline_is_refused_with_its_place(tmp_path, change, message):
    path = tmp_path / "timeline.json"
    write_timelines(RECORD, path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=message):
        read_timelines(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "\ud800"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "timeline.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(RecordError):
        read_timelines(path)
    with pytest.raises(RecordError):
        read_timelines(tmp_path / "missing.json")
