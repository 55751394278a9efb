"""Times in CUDA events: how many are recorded for a message, and when they are read."""

import pytest
import torch

from megatron_lancet.runtime.comm_stats import CommStats, CommTimes, EventPair
from megatron_lancet.runtime.transport.nccl import _StreamTransfer
from tests.fake_events import FakeDevice


@pytest.fixture
def device(monkeypatch):
    return FakeDevice(monkeypatch)


def pass_message(device: FakeDevice, stats: CommStats, sent_ms: float, compute_ms: float) -> None:
    """A message whose transfer takes ``sent_ms``, next to an op of ``compute_ms``."""
    start_ms = device.now_ms
    times = EventPair()
    device.now_ms = start_ms + sent_ms
    times.end.record()
    device.now_ms = start_ms + compute_ms
    _StreamTransfer(times, (), stats).wait()


def test_message_takes_three_events_and_no_query(device):
    stats = CommStats(torch.device("cuda"))
    for _ in range(10):
        pass_message(device, stats, sent_ms=4.0, compute_ms=3.0)
    assert device.counts == {"record": 30, "wait": 10}
    times = stats.take()
    assert (times.all_to_all_ms, times.exposed_ms) == (40.0, 10.0)
    assert device.counts == {"record": 30, "wait": 10, "synchronize": 1, "elapsed": 20}


def test_hidden_message_is_not_exposed(device):
    stats = CommStats(torch.device("cuda"))
    pass_message(device, stats, sent_ms=4.0, compute_ms=9.0)
    pass_message(device, stats, sent_ms=4.0, compute_ms=1.0)
    assert stats.take() == CommTimes(all_to_all_ms=8.0, exposed_ms=3.0)


def test_wait_counts_once_for_several_counters(device):
    stats = CommStats(torch.device("cuda"))
    with stats.waiting("exposed_ms", "all_to_all_ms"):
        device.now_ms += 5.0
    assert stats.take() == CommTimes(all_to_all_ms=5.0, exposed_ms=5.0)
    assert device.counts == {"record": 2, "synchronize": 1, "elapsed": 1}


def test_closed_times_are_read_when_the_device_is_there(device):
    stats = CommStats(torch.device("cuda"))
    stats.add("num_all_to_alls", 1)
    pass_message(device, stats, sent_ms=4.0, compute_ms=3.0)
    closed = stats.close()
    stats.add("num_all_to_alls", 1)
    assert "synchronize" not in device.counts
    assert closed.has_events
    device.reach(3)
    assert closed.read() == CommTimes(all_to_all_ms=4.0, exposed_ms=1.0, num_all_to_alls=1)
    assert stats.take() == CommTimes(num_all_to_alls=1)
    assert device.counts["synchronize"] == 1


def test_reached_events_are_read_without_waiting(device):
    """So that an evaluation of many batches doesn't keep the events of all."""
    stats = CommStats(torch.device("cuda"))
    for _ in range(4):
        pass_message(device, stats, sent_ms=4.0, compute_ms=3.0)
    device.reach(7)  # two messages of three events, and the first event of the third
    waits = device.log.copy()
    stats.read_reached()
    assert device.counts["elapsed"] == 4
    assert device.log == waits
    assert stats.take() == CommTimes(all_to_all_ms=16.0, exposed_ms=4.0)
    assert device.counts["elapsed"] == 8
