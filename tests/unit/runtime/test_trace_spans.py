"""How a log becomes spans; pure arithmetic on made-up milliseconds."""

import weakref
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.runtime import trace as trace_module
from megatron_lancet.runtime.trace import Trace
from megatron_lancet.runtime.trace_log import Busy, Entry, What, blocked_in, spans_of
from megatron_lancet.schedule.timeline import Lane

END, SKIP, CUT, RESUME, LEAVE, RETURN = What


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


def test_op_cut_by_hand_overs_has_several_spans():
    log = [Entry(LEAVE, "", 1.0), Entry(RETURN, "", 4.0), Entry(LEAVE, "", 6.0), Entry(RETURN, "", 7.0)]
    log += [Entry(END, "a", 9.0)]
    assert as_rows(log) == [("a", "compute", 0.0, 1.0), ("a", "compute", 4.0, 6.0), ("a", "compute", 7.0, 9.0)]


def test_log_of_forwards_begins_where_the_first_turn_does():
    assert as_rows([Entry(RETURN, "", 3.0), Entry(END, "a", 5.0)]) == [("a", "compute", 3.0, 5.0)]
    assert as_rows([Entry(RETURN, "", 3.0), Entry(SKIP, "", 4.0), Entry(END, "a", 5.0)]) == [("a", "compute", 4.0, 5.0)]


def test_time_between_two_forwards_belongs_to_no_op():
    log = [Entry(RETURN, "", 0.0), Entry(END, "F.head", 2.0), Entry(LEAVE, "", 3.0)]
    log += [Entry(RETURN, "", 5.0), Entry(SKIP, "", 6.0), Entry(END, "F.embedding", 7.0), Entry(LEAVE, "", 8.0)]
    assert as_rows(log) == [("F.head", "compute", 0.0, 2.0), ("F.embedding", "compute", 6.0, 7.0)]


def test_short_time_at_a_hand_over_belongs_to_the_op_before():
    """The time away counts neither for its length nor for the op."""
    log = [Entry(END, "a", 1.0), Entry(LEAVE, "", 1.01), Entry(RETURN, "", 5.0)]
    log += [Entry(CUT, "m", 5.02, Lane.WAIT), Entry(RESUME, "m", 6.0, Lane.WAIT), Entry(END, "b", 7.0)]
    expected = [("a", "compute", 0.0, 1.01), ("a", "compute", 5.0, 5.02)]
    assert as_rows(log) == [*expected, ("m", "wait", 5.02, 6.0), ("b", "compute", 6.0, 7.0)]


def test_weight_gradient_after_a_hand_over_has_one_span():
    """A profile takes each span of a weight gradient for a whole one."""
    log = [Entry(END, "a", 1.0), Entry(LEAVE, "", 1.01), Entry(RETURN, "", 5.0)]
    log += [Entry(CUT, "w", 5.01), Entry(RESUME, "w", 6.0), Entry(END, "b", 7.0)]
    of_b = [("b", "compute", 1.0, 1.01), ("b", "compute", 5.0, 5.01), ("b", "compute", 6.0, 7.0)]
    assert as_rows(log) == [("a", "compute", 0.0, 1.0), *of_b[:2], ("w", "compute", 5.01, 6.0), of_b[2]]


@dataclass
class Side:
    """A forward or a backward, the log that it should have, and what it did.

    Attributes:
        own_ms: time since its last report in which it ran itself.
        expected_ms: total time of each op, wait and weight gradient.
    """

    own_ms: int
    log: list[Entry]
    expected_ms: defaultdict[str, int]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["end", "skip", "wait", "dw", "hand over"]), st.integers(1, 9), st.integers(1, 9)),
    max_size=60,
)


@given(ACTIONS)
def test_every_op_has_its_own_time_however_hand_overs_cut_it(actions):
    backward, forward = (Side(0, [], defaultdict(int)) for _ in range(2))
    present, other = backward, forward
    now_ms = 0
    for index, (action, before_ms, inside_ms) in enumerate(actions):
        now_ms += before_ms
        present.own_ms += before_ms
        if action == "hand over":
            present.log.append(Entry(LEAVE, "", float(now_ms)))
            other.log.append(Entry(RETURN, "", float(now_ms)))
            present, other = other, present
        elif action in ("end", "skip"):
            present.log.append(Entry(END if action == "end" else SKIP, f"op{index}", float(now_ms)))
            if action == "end":
                present.expected_ms[f"op{index}"] += present.own_ms
            present.own_ms = 0
        else:
            lane = Lane.WAIT if action == "wait" else Lane.COMPUTE
            present.log.append(Entry(CUT, action, float(now_ms), lane))
            now_ms += inside_ms
            present.log.append(Entry(RESUME, action, float(now_ms), lane))
            present.expected_ms[action] += inside_ms
    every = []
    for side in (backward, forward):
        found: defaultdict[str, float] = defaultdict(float)
        for span in spans_of(side.log):
            found[span.name] += span.ms
            every.append(span)
        assert found == side.expected_ms
    every.sort(key=lambda span: span.start_ms)
    assert all(first.end_ms <= second.start_ms for first, second in pairwise(every))


class CountingTrace(Trace):
    """Its clock is one second later at each report."""

    def _now(self) -> float:
        self.now_s = getattr(self, "now_s", self._start_s) + 1.0
        return self.now_s


def test_trace_keeps_the_turns_of_forwards_apart():
    """What ends in a turn is the forward's, dWs included, and the backward's op goes on behind it."""
    trace = CountingTrace(torch.device("cpu"), 0)
    with trace.forward_turn():
        trace.skip()
        trace.end("F.embedding")
    trace.skip()
    with trace.forward_turn():
        with trace.weight_grad("W.output_layer", 8, 4):
            pass
        with trace.waiting("L1.c0.F.dispatch"):
            pass
        trace.end("L1.c0.F.experts")
    trace.end("I.head")
    spans = trace.end_step().timeline.spans
    assert [(span.name, span.lane.value, round(span.ms / 1e3)) for span in spans] == [
        ("F.embedding", "compute", 1),
        ("L1.c0.F.experts", "compute", 1),
        ("I.head", "compute", 1),
        ("L1.c0.F.experts", "compute", 1),
        ("W.output_layer", "compute", 1),
        ("L1.c0.F.experts", "compute", 1),
        ("L1.c0.F.dispatch", "wait", 1),
        ("L1.c0.F.experts", "compute", 1),
        ("I.head", "compute", 1),
    ]


def test_trace_goes_back_to_the_backward_when_a_forward_fails():
    trace = Trace(torch.device("cpu"), 0)

    def fail_in_turn() -> None:
        with trace.forward_turn():
            trace.end("F.embedding")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_turn()
    trace.end("I.head")
    assert [entry.what for entry in trace.log] == [LEAVE, RETURN, END]


def entry(what: What, point_s: float, busy_s: float | None, lane: Lane = Lane.COMPUTE, thread: int = 1) -> Entry:
    return Entry(what, "", point_s, lane, None if busy_s is None else Busy(thread, busy_s))


def test_time_without_running_or_queueing_is_blocked():
    log = [entry(SKIP, 0.0, 5.0), entry(END, 0.010, 5.004), entry(END, 0.020, 5.014)]
    assert list(blocked_in(log)) == [pytest.approx((0.0, 10.0, 6.0))]


@pytest.mark.parametrize(
    "log",
    [
        [entry(CUT, 0.0, 5.0, Lane.WAIT), entry(RESUME, 0.010, 5.0, Lane.WAIT)],
        [entry(LEAVE, 0.0, 5.0), entry(RETURN, 0.010, 5.0)],
        [entry(END, 0.0, 5.0), entry(END, 0.010, 5.0, thread=2)],
        [entry(END, 0.0, None), entry(END, 0.010, None)],
    ],
    ids=["a wait for a message", "another's turn", "two threads", "unknown"],
)
def test_not_blocked(log):
    assert list(blocked_in(log)) == []


def test_time_of_op_in_which_its_thread_did_not_run_is_blocked(monkeypatch):
    now_s, busy_s = 100.0, 7.0
    monkeypatch.setattr(trace_module.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(trace_module, "BusyClock", lambda: SimpleNamespace(now=lambda: Busy(1, busy_s)))
    trace = Trace(torch.device("cpu"), 0)
    now_s, busy_s = now_s + 0.03, busy_s + 0.03
    trace.end("works")
    now_s, busy_s = now_s + 0.05, busy_s + 0.01
    trace.end("sleeps")
    (found,) = trace.end_step().blocked
    assert (found.start_ms, found.end_ms, found.ms) == pytest.approx((30, 80, 40))


class Sent:
    """A message of 2 ms."""

    def interval(self):
        return 1.0, 1.002


def test_messages_are_let_go_at_the_end_of_a_step():
    """A message keeps its tensors, they their graph, and that the trace: a cycle that Python does not see."""
    trace = Trace(torch.device("cpu"), 0)
    message = Sent()
    gone = weakref.ref(message)
    trace.sent("L1.c0.F.dispatch", 30, message, [0, 30])
    del message
    assert gone() is not None
    found = trace.end_step()
    assert gone() is None
    assert [span.num_bytes for span in found.timeline.spans] == [30]
    assert found.bytes_to == {"L1.c0.F.dispatch": ((0, 30),)}
