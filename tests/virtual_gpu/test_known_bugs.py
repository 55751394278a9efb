"""Known bugs of other programs that overlap messages, as small programs: the virtual GPU finds each of them.

- One event for all messages (NVIDIA/Megatron-LM#1810): an event that is recorded again says nothing about what came
  before, so that streams wait for other kernels than they should. With several ranks, collectives then start in
  different orders, and the ranks hang; on one rank the missing order shows.
- A receive buffer that is used again before its reader is done (pytorch/torchtitan#3955).
"""

import os
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from megatron_lancet.testkit.virtual_gpu.device import virtual_gpu
from megatron_lancet.training.platform.cpu import cpu_platform

ROWS = torch.arange(4.0)
LATE = ("comm", "compute")


@pytest.fixture(scope="module", autouse=True)
def megatron_on_cpu():
    with mock.patch.dict(os.environ), cpu_platform():
        yield


@contextmanager
def two_streams(late: str):
    with virtual_gpu() as gpu:
        comm = gpu.Stream()
        comm.name = "comm"
        with gpu.watch([stream for stream in gpu.streams if stream.name == late]):
            yield gpu, gpu.current_stream(), comm


def messages(late: str, events: int):
    """Two messages of one step, each sent when its rows are complete: what arrived, and what the GPU found.

    Args:
        events: number of events that the messages share; one for each is right.
    """
    with two_streams(late) as (gpu, compute, comm):
        arrived = [gpu.Event() for _ in range(events)]
        received = []
        for index in range(2):
            sent = ROWS.cuda() + index
            buffer = torch.empty_like(sent)
            comm.wait_stream(compute)
            with gpu.CurrentStream(comm):
                buffer.copy_(sent)
            arrived[index % events].record(comm if index == 0 or events > 1 else compute)
            received.append((buffer, sent))
        results = []
        for index, (buffer, _) in enumerate(received):
            compute.wait_event(arrived[index % events])
            results.append(buffer + 0)
        gpu.synchronize()
        return [result.clone() for result in results], gpu.problems


@pytest.mark.parametrize("late", LATE)
def test_one_event_for_all_messages_is_found(late):
    _, problems = messages(late, events=1)
    assert {problem.kind for problem in problems} == {"race"}
    assert "read by add on compute" in problems[0].text
    assert "copy_ on comm" in problems[0].text


def test_one_event_for_all_messages_makes_wrong_numbers():
    results, _ = messages("comm", events=1)
    assert not torch.equal(results[0], ROWS)


@pytest.mark.parametrize("late", LATE)
def test_an_event_for_each_message_is_clean(late):
    results, problems = messages(late, events=2)
    assert not problems
    for index, result in enumerate(results):
        assert torch.equal(result, ROWS + index)


def shared_receive_buffer(late: str, waits_for_reader: bool):
    """Two messages into one buffer: what the reader of each has made of it, and what the GPU found."""
    with two_streams(late) as (gpu, compute, comm):
        buffer = torch.empty(ROWS.shape, device="cuda")
        sent = [ROWS.cuda() + index for index in range(2)]
        ready = compute.record_event()
        results: list[torch.Tensor] = []
        for rows in sent:
            comm.wait_event(ready)
            if waits_for_reader and results:
                comm.wait_stream(compute)
            with gpu.CurrentStream(comm):
                buffer.copy_(rows)
            compute.wait_event(comm.record_event())
            results.append(buffer * 2)
        gpu.synchronize()
        return [result.clone() for result in results], gpu.problems


@pytest.mark.parametrize("late", LATE)
def test_receive_buffer_that_is_used_again_too_early_is_found(late):
    _, problems = shared_receive_buffer(late, waits_for_reader=False)
    assert [problem.kind for problem in problems] == ["race"]
    assert "write by copy_ on comm" in problems[0].text
    assert "mul on compute" in problems[0].text


def test_receive_buffer_reused_too_early_makes_wrong_numbers():
    results, _ = shared_receive_buffer("compute", waits_for_reader=False)
    assert not torch.equal(results[0], 2 * ROWS)


@pytest.mark.parametrize("late", LATE)
def test_receive_buffer_that_waits_for_its_reader_is_clean(late):
    results, problems = shared_receive_buffer(late, waits_for_reader=True)
    assert not problems
    for index, result in enumerate(results):
        assert torch.equal(result, 2 * (ROWS + index))
