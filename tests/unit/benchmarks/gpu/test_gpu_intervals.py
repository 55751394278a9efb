"""Interval unions, and what a profiler trace says about communication."""

import random

import pytest

from benchmarks.gpu.intervals import length, uncovered, union
from benchmarks.gpu.trace import communication_of

MESSAGE = "paced_copy_kernel"


def test_union_merges_what_overlaps_or_touches():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7)]) == [(0, 4), (5, 6)]
    assert union([(0, 10), (2, 3)]) == [(0, 10)]
    assert union([]) == []


def test_uncovered_is_what_nothing_hides():
    assert uncovered([(0, 10)], [(2, 3), (2.5, 4), (9, 20)]) == 10 - 2 - 1
    assert uncovered([(0, 4), (2, 6)], []) == 6
    assert uncovered([], [(0, 1)]) == 0
    assert uncovered([(0, 1), (2, 3)], [(1, 2)]) == 2


def test_against_counting_cells():
    dice = random.Random(3)
    for _ in range(200):
        spans, others = ([(s, s + dice.randint(0, 5)) for s in dice.choices(range(20), k=6)] for _ in range(2))
        cells, hidden = ({cell for s, e in group for cell in range(s, e)} for group in (spans, others))
        assert length(spans) == len(cells)
        assert uncovered(spans, others) == len(cells - hidden)


def piece(stream: int, start: float, duration: float, name: str = "gemm", kind: str = "kernel") -> dict:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration, "args": {"stream": stream}}


def test_communication_of_a_trace():
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "args": {"name": "python"}},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 9000, "args": {}},
            piece(7, 0, 1000),
            piece(20, 1000, 3000, MESSAGE),
            piece(20, 4000, 500, MESSAGE),
            piece(7, 2000, 1500),
            piece(9, 3400, 200, "Memset (Device)", "gpu_memset"),
            piece(7, 4600, 1000),
        ]
    }
    found = communication_of(trace)
    assert found.wire_ms == pytest.approx(3.5)
    assert found.exposed_ms == pytest.approx(3.5 - 1.6)  # hidden from 2.0 to 3.6 ms
    assert found.idle_ms == pytest.approx(0.1)  # between the copy and the last kernel


def test_synchronous_collectives_are_on_the_compute_stream():
    trace = {
        "traceEvents": [
            piece(7, 0, 1000),
            piece(7, 1000, 3500, MESSAGE),
            piece(7, 4500, 1000),
            piece(9, 2000, 1000),
        ]
    }
    found = communication_of(trace)
    assert found.wire_ms == pytest.approx(3.5)
    assert found.exposed_ms == pytest.approx(3.5 - 1.0)


def test_a_trace_without_messages_is_an_error():
    with pytest.raises(ValueError, match=r"2 pieces of work on 1 streams, but no paced_copy_kernel"):
        communication_of({"traceEvents": [piece(7, 0, 1), piece(7, 2, 1)]})
