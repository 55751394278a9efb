"""Messages of a paced link on the virtual GPU's streams: order, words, and what a late stream delivers."""

import sys

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.testkit.mock import paced_link
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_work import DeviceWork
from megatron_lancet.testkit.mock.pace import Pace, Words
from megatron_lancet.testkit.mock.paced_link import PacedLink
from megatron_lancet.testkit.mock.transfer import Transfer
from megatron_lancet.testkit.virtual_gpu.device import virtual_gpu
from megatron_lancet.testkit.virtual_gpu.link import KERNEL, virtual_link
from megatron_lancet.testkit.virtual_gpu.log import Kernel, StreamWaits
from megatron_lancet.training.platform.cpu import cpu_platform

MODEL = Link(latency_us=10, gbytes_per_s=1)
NUM_BYTES = 4000


@pytest.fixture
def gpu():
    with cpu_platform(), virtual_gpu() as gpu, virtual_link(gpu):
        yield gpu


@pytest.fixture
def link():
    return PacedLink(MODEL)


def message(link, group_stream) -> tuple[DeviceWork, torch.Tensor, torch.Tensor]:
    """The message, what it receives and what it sends."""
    sent, received = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    transfer = Transfer([(received, sent)])
    return DeviceWork(lambda: link.send(transfer, NUM_BYTES), [sent], [received], group_stream), received, sent


def kernels_of(gpu) -> list[tuple[str, int]]:
    return [(entry.name, entry.stream) for entry in gpu.log if isinstance(entry, Kernel) and "copy" in entry.name]


def test_asynchronous_message_runs_on_the_stream_of_its_group(gpu, link):
    stream = gpu.Stream()
    with gpu.watch(late=[stream]):
        work, received, _sent = message(link, stream)
        assert not work.is_completed()
        assert kernels_of(gpu) == [(KERNEL, stream.id)]
        assert work.wait()
        seen = received + 1
        assert work.is_completed()
    assert seen.eq(2).all()
    assert gpu.problems == []


def test_asynchronous_message_that_is_not_waited_for_is_found(gpu, link):
    stream = gpu.Stream()
    with gpu.watch(late=[stream]):
        _, received, _sent = message(link, stream)
        seen = received + 1
    assert seen.eq(1).all()
    assert "read by add" in gpu.problems[0].text


def test_tensor_that_is_changed_while_it_is_sent_is_found(gpu, link):
    stream = gpu.Stream()
    with gpu.watch(late=[stream]):
        work, received, sent = message(link, stream)
        sent.fill_(5)
        work.wait()
    assert received.eq(5).all()
    assert KERNEL in gpu.problems[0].text


def test_synchronous_message_runs_on_the_callers_stream(gpu, link):
    stream = gpu.Stream()
    with gpu.watch(late=[stream]), torch.cuda.stream(stream):
        work, received, _ = message(link, None)
        assert work.wait()
        seen = received + 1
        assert kernels_of(gpu) == [(KERNEL, stream.id)]
        assert not [entry for entry in gpu.log if isinstance(entry, StreamWaits)]
    assert seen.eq(2).all()
    assert gpu.problems == []


def test_messages_of_one_link_queue_whatever_their_streams(gpu, link):
    stream = gpu.Stream()
    with gpu.watch():
        message(link, None)
        first = link.last_times_ns()
        work, *_ = message(link, stream)
        work.wait()
        with torch.cuda.stream(stream):
            second = link.last_times_ns()
    took_ns = round(MODEL.time_us(NUM_BYTES) * 1e3)
    assert first[1] - first[0] == second[1] - second[0] == took_ns
    assert second[0] == first[1]


def test_words_that_two_streams_share_are_a_race(gpu, link):
    """A mutant of the link: one state for all streams."""
    stream = gpu.Stream()
    with gpu.watch():
        message(link, None)
        link._states[stream.cuda_stream] = next(iter(link._states.values()))
        _work, *_ = message(link, stream)
        message(link, None)
    assert any(KERNEL in problem.text for problem in gpu.problems)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_dense_and_other_tensors_arrive(gpu, link, dtype, late):
    values = torch.arange(24).remainder(2).to(dtype)
    stream = gpu.Stream()
    with gpu.watch(late=[stream] if late else []):
        sent = torch.empty(24, dtype=dtype, device="cuda").copy_(values).view(4, 6)
        received = [torch.zeros(4, 6, dtype=dtype, device="cuda") for _ in range(4)]
        wide = torch.zeros(4, 8, dtype=dtype, device="cuda")
        empty = torch.zeros(0, 6, dtype=dtype, device="cuda")
        transposed = torch.zeros(6, 4, dtype=dtype, device="cuda").t()
        copies = [(received[0], sent), (wide[:, 1:7], sent), (empty, empty), (transposed, sent)]
        copies += [(received[1].t(), sent.t()), (received[2].view(-1), sent)]
        work = DeviceWork(lambda: link.send(Transfer(copies), NUM_BYTES), [sent], [wide], stream)
        work.wait()
        for target, source in copies:
            assert target.eq(source.view_as(target) if source.is_contiguous() else source).all()
        assert not wide[:, 0].any()
        assert not wide[:, 7].any()
    assert sum(name == KERNEL for name, _ in kernels_of(gpu)) == 5, "one for each tensor that has elements"


@pytest.mark.parametrize(("num_rows", "num_kernels"), [(4, 1), (1 << 18, 8)])
def test_small_parts_that_lie_side_by_side_are_one_kernel(gpu, link, num_rows, num_kernels):
    with gpu.watch():
        sent, received = torch.arange(num_rows, device="cuda"), torch.zeros(8 * num_rows + 1, device="cuda").long()
        link.send(Transfer([(part, sent) for part in received[:-1].view(8, -1)]), NUM_BYTES)
        assert received[:-1].view(8, -1).eq(sent).all()
        assert received[-1] == 0
        assert sum(name == KERNEL for name, _ in kernels_of(gpu)) == num_kernels


def test_reductions_go_over_the_link_and_are_reduced_behind_it(gpu, link):
    with gpu.watch():
        x, y = torch.ones(4, device="cuda"), torch.ones(2, 2, device="cuda").t()
        link.send(Transfer(in_place=[x, y], factor=8), NUM_BYTES)
        assert x.eq(8).all()
        assert y.eq(8).all()
        assert [name for name, _ in kernels_of(gpu)].count(KERNEL) == 2


def test_an_empty_message_takes_the_latency(gpu, link):
    with gpu.watch():
        empty = torch.empty(0, device="cuda")
        link.send(Transfer([(empty, empty), (empty, empty)]), 0)
        start, end = link.last_times_ns()
    assert end - start == 10_000


def test_a_free_link_is_a_plain_copy(gpu):
    with gpu.watch():
        _, received, _ = message(PacedLink(Link()), None)
        assert kernels_of(gpu) == [("copy_", gpu.default.id)]
    assert received.eq(1).all()


def test_a_message_that_no_gpu_waits_for_is_refused(gpu):
    with pytest.raises(UsageError, match=r"takes 4e\+03 s on a mocked link .* a GPU waits 60 s at most"):
        message(PacedLink(Link(gbytes_per_s=1e-9)), None)


def test_a_message_that_gave_up_is_an_error_of_the_next_one(gpu, link):
    message(link, None)
    link._gave_up[0].fill_(1)
    with pytest.raises(RuntimeError, match="gave up on the GPU after 60 s"):
        message(link, None)


def test_a_machine_without_triton_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "megatron_lancet.testkit.mock.paced_kernel", raising=False)
    tensor = torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(UsageError, match="needs Triton"):
        paced_link.launch(tensor, tensor, Pace(0, 0, 0, True), Words(tensor, tensor, tensor), 1)
