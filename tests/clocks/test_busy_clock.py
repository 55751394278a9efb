"""Figures of Linux's scheduler for a sleeping thread and for a working thread."""

import time
from pathlib import Path

import pytest
import torch

from megatron_lancet.runtime.trace import Trace

pytestmark = pytest.mark.alone


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="needs figures of Linux's scheduler")
def test_a_sleep_in_an_op_is_blocked_and_work_is_not():
    trace = Trace(torch.device("cpu"), 0)
    until_s = time.thread_time() + 0.03
    while time.thread_time() < until_s:  # takes longer on a busy machine, but then waits for a core
        pass
    trace.end("works")
    time.sleep(0.05)
    trace.end("sleeps")
    found = trace.end_step()
    (sleeps,) = (span for span in found.timeline.spans if span.name == "sleeps")
    in_sleep = [part for part in found.blocked if part.start_ms >= sleeps.start_ms - 0.01]
    assert sum(part.ms for part in in_sleep) >= 45
    assert sum(part.ms for part in found.blocked) - sum(part.ms for part in in_sleep) < 15
