"""How a log becomes spans; pure arithmetic on made-up milliseconds."""

import pytest

from megatron_lancet.runtime.trace import Entry, What, spans_of
from megatron_lancet.schedule.timeline import Lane

END, SKIP, CUT, RESUME = What


def as_rows(log: list[Entry]) -> list[tuple[str, str, float, float]]:
    return [(span.name, span.lane.value, span.start_ms, span.end_ms) for span in spans_of(log)]


def test_op_span_begins_at_the_end_of_the_previous_op():
    log = [Entry(SKIP, "", 2.0), Entry(END, "a", 5.0), Entry(END, "b", 6.0)]
    assert as_rows(log) == [("a", "compute", 2.0, 5.0), ("b", "compute", 5.0, 6.0)]


def test_skipped_time_belongs_to_no_span():
    log = [Entry(END, "a", 1.0), Entry(CUT, "m", 3.0, Lane.WAIT), Entry(RESUME, "m", 4.0, Lane.WAIT)]
    log += [Entry(SKIP, "", 7.0), Entry(END, "b", 8.0)]
    assert as_rows(log) == [("a", "compute", 0.0, 1.0), ("m", "wait", 3.0, 4.0), ("b", "compute", 7.0, 8.0)]


@pytest.mark.parametrize("lane", [Lane.WAIT, Lane.COMPUTE])
def test_waits_and_weight_gradients_are_cut_out_of_op_spans(lane):
    log = [Entry(CUT, "m", 1.0, lane), Entry(RESUME, "m", 3.0, lane), Entry(END, "a", 7.0)]
    assert as_rows(log) == [("a", "compute", 0.0, 1.0), ("m", lane.value, 1.0, 3.0), ("a", "compute", 3.0, 7.0)]


def test_time_just_before_a_wait_belongs_to_the_previous_op():
    log = [Entry(END, "a", 1.0), Entry(CUT, "m", 1.01, Lane.WAIT), Entry(RESUME, "m", 3.0, Lane.WAIT)]
    log += [Entry(END, "b", 4.0)]
    assert as_rows(log) == [("a", "compute", 0.0, 1.01), ("m", "wait", 1.01, 3.0), ("b", "compute", 3.0, 4.0)]


def test_spans_of_equal_weight_gradients_stay_apart():
    log = [Entry(SKIP, "", 1.0)]
    for start_ms in (1.0, 2.01):
        log += [Entry(CUT, "w", start_ms, Lane.COMPUTE), Entry(RESUME, "w", start_ms + 1.0, Lane.COMPUTE)]
    found = as_rows(log)
    assert [row[0] for row in found] == ["w", "w"]
    assert found[1][2:] == (2.0, 3.01)  # with the moment that the store took


def test_op_that_ends_twice_in_a_row_is_one_span():
    log = [Entry(END, "postprocess", 1.0), Entry(END, "postprocess", 1.5), Entry(END, "next", 2.0)]
    assert as_rows(log) == [("postprocess", "compute", 0.0, 1.5), ("next", "compute", 1.5, 2.0)]
