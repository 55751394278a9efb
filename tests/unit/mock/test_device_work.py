"""Streams of a mocked message on a device, on the virtual GPU's streams."""

import pytest
import torch

from megatron_lancet.mock.mock_work import DeviceWork
from megatron_lancet.training.platform.cpu import cpu_platform
from megatron_lancet.virtual_gpu.device import virtual_gpu
from megatron_lancet.virtual_gpu.log import Kernel, StreamWaits


@pytest.fixture
def gpu(monkeypatch):
    with cpu_platform(), virtual_gpu() as gpu:
        monkeypatch.setattr(torch.cuda, "_sleep", lambda n: gpu.note(Kernel(gpu.current_stream().id, f"{n}", 0, 0)))
        yield gpu


def message(group_stream, cycles: int = 7) -> tuple[DeviceWork, torch.Tensor, torch.Tensor]:
    """The message, what it receives and what it sends."""
    sent, received = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    return DeviceWork(lambda: received.copy_(sent), [sent], [received], group_stream, cycles), received, sent


def test_asynchronous_message_runs_on_the_stream_of_its_group(gpu):
    stream = gpu.Stream()
    with gpu.watch(late=[stream]):
        work, received, _sent = message(stream)
        assert not work.is_completed()
        kernels = {entry.name: entry.stream for entry in gpu.log if isinstance(entry, Kernel)}
        assert kernels["7"] == kernels["copy_"] == stream.id
        assert work.wait()
        seen = received + 1
        assert work.is_completed()
    assert seen.eq(2).all()
    assert gpu.problems == []


def test_asynchronous_message_that_is_not_waited_for_is_found(gpu):
    stream = gpu.Stream()
    with gpu.watch(late=[stream]):
        _, received, _sent = message(stream)
        seen = received + 1
    assert seen.eq(1).all()
    assert "read by add" in gpu.problems[0].text


def test_synchronous_message_runs_on_the_callers_stream_which_waits_for_nothing(gpu):
    stream = gpu.Stream()
    with gpu.watch(late=[stream]), torch.cuda.stream(stream):
        work, received, _ = message(None, cycles=0)
        assert work.wait()
        seen = received + 1
        assert {entry.stream for entry in gpu.log if isinstance(entry, Kernel)} == {stream.id}
        assert not [entry for entry in gpu.log if isinstance(entry, StreamWaits)]
    assert seen.eq(2).all()
    assert gpu.problems == []
