"""The page over a run, and the bars above a timeline."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from megatron_lancet.files.records import to_plain
from megatron_lancet.lab.views.bars import step_bars
from megatron_lancet.lab.views.html import page
from megatron_lancet.lab.views.run_page import run_page, write_run_page
from megatron_lancet.lab.views.trace_file import read_trace, write_trace
from megatron_lancet.report.compared import Compared
from megatron_lancet.report.history import StepPoint
from tests.unit.report import steps

COMPARED = Compared(744.0, 523.0, 372.0, 52.3, 10)
ABOUT = {"model": "4 layers & <more>", "num_ranks": 2, "device": "CPU", "unit": "rank", "date": "2026-11-27"}


def report(points: list[StepPoint], tuned: list[list[int]] | None = None) -> dict:
    tuning = {} if tuned is None else {"tuning": {"steps": tuned}}
    return {
        "run": ABOUT,
        "plan_text": "two chunks",
        "verdict": "1.42x faster",
        "steps": to_plain(points),
        **tuning,
    }


def svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(part.split("</svg>")[0].join(("<svg", "</svg>"))) for part in text.split("<svg")[1:]]


def test_run_page_draws_each_step_and_marks_tuning():
    points = [StepPoint(step, 1, 200.0 if step <= 4 else 100.0, 50.0) for step in range(1, 11)]
    text = run_page(report(points, [[1, 4]]))
    step, share = svgs(text)
    for chart in (step, share):
        (line,) = chart.findall("polyline")
        assert len(line.get("points").split()) == 10
        (mark,) = chart.findall("rect")
        assert mark.find("title").text == "tuning, steps 1 to 4"
    heights = [float(point.split(",")[1]) for point in step.find("polyline").get("points").split()]
    assert heights[0] == heights[3] < heights[4] == heights[9]  # longer steps are higher up
    shares = [float(point.split(",")[1]) for point in share.find("polyline").get("points").split()]
    assert shares[0] > shares[9]  # 25 % is below 50 %
    assert "1.42x faster" in text
    assert "shaded" in text


def test_run_page_of_a_fixed_plan_marks_nothing():
    text = run_page(report([StepPoint(1, 1, 100.0, 0.0)]))
    assert "shaded" not in text
    assert all(not chart.findall("rect") for chart in svgs(text))


def test_run_page_is_closed_to_texts_and_networks(tmp_path):
    path = write_run_page(report([StepPoint(1, 2, 100.0, 0.0), StepPoint(3, 2, 90.0, 1.0)]), tmp_path / "new")
    text = path.read_text()
    assert "4 layers &amp; &lt;more&gt;" in text
    assert "default-src 'none'" in text
    assert "<script" not in text
    assert "http://" not in text
    assert "https://" not in text
    assert "a mean over up to 2 steps" in text


def test_bars_show_both_steps_and_the_speed_up():
    text = step_bars(replace(steps.record(), compared=COMPARED))
    assert "1.42x as fast</strong>: 744.0 ms a step without overlap, 50 % of it waiting" in text
    assert "523.0 ms under the plan, 10 % (medians of 10 steps each, measured in turns)" in text
    widths = [float(part.split("%")[0]) for part in text.split("width:")[1:]]
    assert widths == pytest.approx([50, 50, 100 * 470.7 / 744, 100 * 52.3 / 744], abs=0.01)


def test_bar_without_overlap_stands_alone_where_it_won():
    text = step_bars(replace(steps.record(), compared=Compared(744.0, 744.0, 372.0, 372.0, 10)))
    assert "No plan was faster than no overlap: 744.0 ms a step, 50 % of it waiting (striped), medians of 10" in text
    assert text.count('class="bar"') == 1


def test_bars_of_traced_steps_say_that_they_are_single_ones():
    assert "(one traced step each)" in step_bars(steps.record())
    assert step_bars(replace(steps.record(), before=())) == ""


def test_timeline_page_says_what_ran(tmp_path):
    record = replace(steps.record(title="two chunks"), about="4 layers; 2 ranks", step=17, compared=COMPARED)
    text = page(record)
    assert "<h1>4 layers; 2 ranks</h1>" in text
    assert '<p id="plan">two chunks</p>' in text
    assert "<h2>Traced step 17</h2>" in text
    assert "<code>L1.c0.I.dispatch</code>" in text
    write_trace(record, tmp_path / "trace.json")
    again = read_trace(tmp_path / "trace.json")
    assert (again.about, again.step, again.compared) == (record.about, 17, COMPARED)
    assert "<h1>a step</h1>" in page(steps.record())
