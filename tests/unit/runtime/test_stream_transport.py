"""Streams of the NCCL transport, with stand-ins that log what is enqueued on which of them."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_lancet.runtime import device as tensor_device
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.runtime.transport.nccl import StreamTransport


class Device:
    """One device in the host's memory: streams with names, and a log of their work."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_streams = 0
        self.current = self.stream()

    def stream(self, priority: int = 0) -> "Stream":
        self.num_streams += 1
        return Stream(self, f"stream {self.num_streams}", priority)

    @contextmanager
    def on(self, stream: "Stream"):
        outer, self.current = self.current, stream
        yield
        self.current = outer

    def note(self, what: str) -> None:
        self.log.append(f"{self.current.name}: {what}")


class Stream:
    def __init__(self, device: Device, name: str, priority: int) -> None:
        self.device, self.name, self.priority = device, name, priority

    def record_event(self) -> "Event":
        event = Event(self.device)
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        self.device.log.append(f"{self.name}: waits for {event.place}")

    def wait_stream(self, other: "Stream") -> None:
        self.device.log.append(f"{self.name}: waits for all of {other.name}")


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.place = device, ""

    def record(self, stream: Stream | None = None) -> None:
        self.place = f"{(stream or self.device.current).name} at {len(self.device.log)}"

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.device.log.append("host: waits")


@pytest.fixture
def device(monkeypatch) -> Device:
    device = Device()
    monkeypatch.setattr(tensor_device, "_is_cuda", lambda _: True)
    monkeypatch.setattr(torch.cuda, "Stream", type("", (), {"__new__": lambda _, priority: device.stream(priority)}))
    monkeypatch.setattr(torch.cuda.Stream, "priority_range", staticmethod(lambda: (0, -5)), raising=False)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(device))
    monkeypatch.setattr(torch.cuda, "stream", device.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device.current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: device.note(f"kept for {stream.name}"))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))

    def all_to_all(received, sent, *_, group):
        device.note(f"all-to-all of {group.name}")
        received.copy_(sent)

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    return device


def transport_on(device: Device) -> StreamTransport:
    rows, counts = (SimpleNamespace(name=name, size=lambda: 2) for name in ("rows", "counts"))
    return StreamTransport(rows, counts, CommStats(torch.device("cuda")))


def test_counts_wait_for_the_router_only(device):
    transport = transport_on(device)
    routing_map = torch.tensor([[True, False], [True, True]])
    device.note("router")
    routed = ReadyEvent(routing_map)
    device.note("attention of another chunk")
    transport.launch(torch.empty(2), torch.ones(2), [1, 1], [1, 1])
    del device.log[2:]

    def count() -> torch.Tensor:
        device.note("count")
        return routing_map.sum(dim=0)

    counts = transport.exchange_counts(count, routed)
    assert device.log[2:] == [
        "stream 3: waits for stream 1 at 1",
        "stream 3: count",
        "stream 3: all-to-all of counts",
        "stream 1: kept for stream 1",
    ]
    known = counts.wait()
    assert device.log[-1] == "host: waits"
    assert known.sent == known.received == [[2], [1]]
    assert known.received_on_device.tolist() == [[2], [1]]
    assert counts.num_bytes == 8  # one of two counts stays on this rank


def test_streams_of_the_transport_have_the_highest_priority(device):
    transport = transport_on(device)
    assert transport._stream.priority == transport._counts_stream.priority == -5
    assert transport._stream is not transport._counts_stream
