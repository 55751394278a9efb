"""timeline.html in a real headless Chromium: what is drawn, hover, zoom, move, search, colours, size, safety."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lancet.files.records import to_plain
from megatron_lancet.lab.views.html import page, write_page
from megatron_lancet.lab.views.run_page import write_run_page
from megatron_lancet.report.compared import Compared
from megatron_lancet.report.history import StepPoint
from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span
from tests.cli.report.chromium import Browser, path_of_chromium
from tests.unit.report import steps

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!--"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = path_of_chromium()
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium, then the page is checked in it")
    with Browser(program, tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def shown(browser, tmp_path):
    """Opens a page of a record; afterwards nobody complained and nothing but the file was asked for."""
    paths: list[Path] = []

    def show(record, **size):
        paths.append(tmp_path / f"timeline{len(paths)}.html")
        write_page(record, paths[-1])
        browser.scheme("light")
        browser.open(paths[-1], **size)
        return browser

    yield show
    assert browser.complaints() == []
    assert browser.requests() == [paths[-1].as_uri()]


def view(browser):
    found = browser.js("({...document.getElementById('timeline').dataset})")
    return float(found["from"]), float(found["to"])


def point(browser, ms, y, group=0):
    """Where on the screen a moment of a group is, ``y`` pixels below its top."""
    box = browser.js(f"document.querySelectorAll('#groups canvas')[{group}].getBoundingClientRect().toJSON()")
    start, end = view(browser)
    return box["x"] + (ms - start) / (end - start) * box["width"], box["y"] + y


def tip(browser):
    return browser.js("document.getElementById('tip').hidden ? null : document.getElementById('tip').innerText")


def pixel(browser, x, y, group=0):
    """Red, green and blue of a canvas at a point of the screen, read from a copy of one pixel."""
    return browser.js(
        f"(() => {{ const from = document.querySelectorAll('#groups canvas')[{group}];"
        " const box = from.getBoundingClientRect(), to = document.createElement('canvas');"
        " to.width = to.height = 1; const context = to.getContext('2d');"
        f" context.drawImage(from, Math.floor({x} - box.x), Math.floor({y} - box.y), 1, 1, 0, 0, 1, 1);"
        " return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3) })()"
    )


ONE = TimelineRecord(
    "one rank",
    measured=(
        RankTimeline(
            0,
            (
                Span("L1.c0.F.attention", Lane.COMPUTE, 0.0, 40.0),
                Span("L1.c0.F.dispatch", Lane.COMM, 40.0, 80.0, 123456),
                Span("L1.c0.F.dispatch", Lane.WAIT, 40.0, 80.0),
                Span("L1.W.mlp.linear_fc1", Lane.COMPUTE, 80.0, 100.0),
            ),
            100.0,
        ),
    ),
    reasons={"L1.c0.F.dispatch": "nothing left to run"},
)


def test_timeline_page_hover_explains_the_span_under_the_mouse(shown):
    browser = shown(ONE)
    browser.mouse("Moved", *point(browser, 60.0, 15))
    assert "layer 1, chunk 0, forward, dispatch\ncompute waits for this message" in tip(browser)
    assert "why, as planned\nnothing left to run" in tip(browser)
    browser.mouse("Moved", *point(browser, 60.0, 40))
    words = re.sub(r"\s+", " ", tip(browser))
    assert words == (
        "L1.c0.F.dispatch layer 1, chunk 0, forward, dispatch where rank 0 measured, communication layer 1 chunk 0 "
        "phase forward start 40.00 ms duration 40.00 ms sent 123.46 kB (123456 bytes)"
    )
    browser.mouse("Moved", *point(browser, 90.0, 15))
    assert "layer 1, backward (weight gradient), mlp.linear_fc1" in tip(browser)
    browser.mouse("Moved", *point(browser, 20.0, 40))
    assert tip(browser) is None


def test_timeline_page_wheel_drag_keys_and_buttons_change_view(shown):
    browser = shown(ONE)
    assert view(browser) == (0, 100)
    x, y = point(browser, 60.0, 15)
    browser.mouse("Wheel", x, y, deltaX=0, deltaY=-400)
    start, end = view(browser)
    assert end - start == pytest.approx(100 / 2.718, rel=0.01)
    assert point(browser, 60.0, 15)[0] == pytest.approx(x, abs=1)  # zooms around the mouse
    browser.mouse("Pressed", x, y, button="left", clickCount=1)
    browser.mouse("Moved", x + 100, y, button="left", buttons=1)
    browser.mouse("Released", x + 100, y, button="left", clickCount=1)
    assert point(browser, 60.0, 15)[0] == pytest.approx(x + 100, abs=1)
    browser.key("0")
    assert view(browser) == (0, 100)
    browser.key("+")
    start, end = view(browser)
    assert (start, end) == pytest.approx((50 - 50 / 1.5, 50 + 50 / 1.5))
    browser.key("ArrowRight")
    assert view(browser)[1] == pytest.approx(min(100, end + 0.2 * (end - start)))
    browser.key("ArrowLeft")
    browser.key("-")
    assert view(browser) == pytest.approx((0, 100))
    browser.key("-")
    assert view(browser) == pytest.approx((0, 100))  # never wider than the step
    (left, y), (right, _) = point(browser, 20.0, 15), point(browser, 30.0, 15)
    browser.mouse("Pressed", left, y, button="left", clickCount=1, modifiers=8)
    browser.mouse("Moved", right, y, button="left", buttons=1, modifiers=8)
    browser.mouse("Released", right, y, button="left", clickCount=1, modifiers=8)
    assert view(browser) == pytest.approx((20, 30), abs=0.2)
    browser.js("document.getElementById('reset').click()")
    browser.drawn()
    assert view(browser) == (0, 100)


def test_timeline_page_search_highlights_and_counts_matches(shown):
    browser = shown(ONE)
    attention, weight = point(browser, 20.0, 3), point(browser, 90.0, 3)
    blue, orange = pixel(browser, *attention), pixel(browser, *weight)
    browser.key("/")
    browser.type("backward mlp")
    assert browser.js("document.getElementById('found').textContent") == "1 found, 20.00 ms in all"
    assert pixel(browser, *attention) == [0xE3, 0xE6, 0xEA]
    assert pixel(browser, *weight) == orange == [0xE6, 0x9F, 0x00]
    browser.key("Enter")
    assert "L1.W.mlp.linear_fc1" in tip(browser)
    browser.key("Escape")
    assert pixel(browser, *attention) == blue == [0x00, 0x72, 0xB2]
    assert browser.js("document.getElementById('found').textContent") == ""


def test_timeline_page_shows_ranks_predictions_and_summary(shown):
    browser = shown(steps.record(num_layers=3))
    labels = browser.js("[...document.querySelectorAll('#groups strong')].map(e => e.textContent)")
    assert labels == ["rank 0 measured", "rank 0 predicted", "rank 1 measured", "rank 1 predicted"]
    rows = browser.js("[...document.querySelectorAll('#summary tr')].map(e => e.innerText.trim().split(/\\s+/))")
    assert rows[0] == ["layer", "chunk", "before", "measured", "predicted"]
    assert rows[1:] == [*([str(n), "0", "8.00", "1.20", "0.80"] for n in (1, 2, 3)), ["all", "24.00", "3.60", "2.40"]]
    browser.js("document.querySelectorAll('#summary button')[1].click()")
    assert browser.js("document.getElementById('search').value") == "L2.c0."


def test_timeline_page_of_a_fixed_plan_has_no_empty_columns(shown):
    browser = shown(ONE)
    rows = browser.js("[...document.querySelectorAll('#summary tr')].map(e => e.innerText.trim().split(/\\s+/))")
    assert rows == [["layer", "chunk", "measured"], ["1", "0", "40.00"], ["all", "40.00"]]
    assert browser.js("document.getElementById('bars')") is None


def test_timeline_page_shows_the_end_of_the_step_and_bars(shown):
    compared = Compared(744.0, 523.0, 372.0, 52.3, 10)
    timeline = replace(ONE.measured[0], step_ms=150.0)
    browser = shown(replace(ONE, measured=(timeline,), about="4 layers; 2 ranks", compared=compared))
    assert browser.js("document.querySelector('h1').textContent") == "4 layers; 2 ranks"
    assert pixel(browser, *point(browser, 145.0, 3)) == [0xE3, 0xE6, 0xEA]
    assert pixel(browser, *point(browser, 145.0, 33)) == [0, 0, 0]  # nothing is drawn on the row of messages
    bars = "[...document.querySelectorAll('#bars .bar')].map(e => [...e.children].map(c => c.clientWidth))"
    stock, own = browser.js(bars)
    assert sum(own) / sum(stock) == pytest.approx(523 / 744, abs=0.01)
    assert stock[1] / sum(stock) == pytest.approx(0.5, abs=0.01)
    assert "1.42x as fast" in browser.js("document.body.innerText")


def test_run_page_draws_without_a_script(browser, tmp_path):
    points = [StepPoint(step, 1, 100.0 + step, 10.0) for step in range(1, 50)]
    run = {"model": "4 layers", "num_ranks": 2, "device": "CPU", "unit": "rank", "date": "2026-11-27"}
    report = {"run": run, "plan_text": EVIL, "verdict": "1.42x faster", "steps": to_plain(points)}
    path = write_run_page({**report, "tuning": {"steps": [[1, 20]]}}, tmp_path)
    browser.open(path)
    assert browser.complaints() == []
    assert browser.requests() == [path.as_uri()]
    widths = browser.js("[...document.querySelectorAll('polyline')].map(e => e.getBBox().width)")
    assert len(widths) == 2
    assert min(widths) > 900
    shaded, whole = browser.js("[document.querySelector('.tuned').getBBox().width, 920]")
    assert shaded / whole == pytest.approx(20 / 49, abs=0.02)
    assert EVIL in browser.js("document.body.innerText")


def test_timeline_page_in_dark_mode_and_narrow_window(shown):
    browser = shown(ONE, width=1000)
    spot = point(browser, 20.0, 3)
    light_page = browser.js("getComputedStyle(document.body).backgroundColor")
    light = pixel(browser, *spot)
    browser.scheme("dark")
    assert browser.js("getComputedStyle(document.body).backgroundColor") != light_page
    assert pixel(browser, *spot) != light
    browser.call("Emulation.setDeviceMetricsOverride", width=420, height=800, deviceScaleFactor=2, mobile=False)
    browser.drawn()
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    assert browser.js("(c => c.width === 2 * c.clientWidth)(document.querySelector('#groups canvas'))")


def test_timeline_page_escapes_names(shown):
    spans = (Span(EVIL, Lane.COMPUTE, 0, 50), Span(EVIL, Lane.COMM, 0, 50, 1), Span(EVIL, Lane.WAIT, 50, 100))
    record = TimelineRecord(EVIL, (RankTimeline(0, spans, 100),), reasons={EVIL: EVIL})
    assert page(record).count("</script>") == page(ONE).count("</script>") == 2
    browser = shown(record)
    browser.mouse("Moved", *point(browser, 75.0, 15))
    assert tip(browser).count(EVIL) == 3  # name, in words, reason
    assert browser.js("document.title") == EVIL
    assert browser.js("document.images.length") == 0
    assert browser.js("document.scripts.length") == 2


def test_timeline_page_draws_only_visible_spans(shown):
    """At first all are shown, as shares of each pixel; zoomed in, only what is in view is looked at."""
    spans = []
    for index in range(50_000):
        name = f"L{1 + index % 48}.c{index % 4}.F.experts"
        spans.append(Span(name, Lane.COMPUTE, index * 0.02, index * 0.02 + 0.015))
        spans.append(Span(name.replace("experts", "combine"), Lane.WAIT, index * 0.02 + 0.015, index * 0.02 + 0.02))
    browser = shown(TimelineRecord("many", (RankTimeline(0, tuple(spans), 1000.0),)))
    drawn = "Number(document.getElementById('timeline').dataset.drawn)"
    assert browser.js(drawn) == 100_000
    # A quarter of each pixel is waiting: so is a quarter of the height, not all of it.
    x, y = point(browser, 500.0, 0)
    assert pixel(browser, x, y + 3) == [0xD5, 0x5E, 0x00]
    assert pixel(browser, x, y + 15) == [0x00, 0x72, 0xB2]
    for _ in range(20):
        browser.key("+")
    assert 0 < browser.js(drawn) < 100
    browser.mouse("Moved", *point(browser, sum(view(browser)) / 2, 15))
    assert "chunk" in tip(browser)


def test_timeline_page_of_an_empty_step(shown):
    browser = shown(TimelineRecord("nothing", (RankTimeline(0, (), 0.0),)))
    assert browser.js("document.querySelectorAll('#groups canvas').length") == 1
    assert browser.js("document.getElementById('legend').children.length") == 0


def test_timeline_page_title_may_contain_a_placeholder():
    assert "<h1>@@DATA@@</h1>" in page(replace(ONE, title="@@DATA@@"))
    assert not re.search(r"https?://", page(ONE))
