"""Small programs on the transport for NCCL or on the forward lane, which show what the model hides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megatron_lancet.features.pairing.lane import ForwardLane
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.runtime.transport.nccl import StreamTransport
from megatron_lancet.testkit.mock.mock_world import mock_world
from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu
from megatron_lancet.testkit.virtual_gpu.megatron import virtual_gpu_platform
from tests.virtual_gpu.case import IN_ORDER, Found, name_streams

NUM_RANKS, NUM_ROWS, WIDTH = 4, 8, 16
ROWS = [NUM_ROWS // NUM_RANKS] * NUM_RANKS

type Results = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Program:
    """What is run on the transport; returns by name what it got and what it should have got.

    Attributes:
        late: for each run the names of streams that are late.
    """

    function: Callable[[StreamTransport, CommStats], Results]
    late: Sequence[Sequence[str]] = (IN_ORDER,)


def run_program(program: Program) -> Found:
    """Runs a program on the virtual GPU, once for each entry of ``late``."""
    errors: dict[str, float] = {}
    with mock_world(NUM_RANKS), virtual_gpu_platform() as gpu:
        group = dist.group.WORLD
        assert group is not None
        stats = CommStats(torch.device("cuda"))
        transport = StreamTransport(group, group, stats)
        name_streams(transport)
        for names in program.late:
            with gpu.watch(_named(gpu, names)):
                results = program.function(transport, stats)
            for name, (got, expected) in results.items():
                error = float((got - expected).abs().max())
                errors[name] = error if error == error else float("inf")
        return Found(0.0, errors, list(gpu.problems))


def _named(gpu: VirtualGpu, names: Sequence[str]) -> list:
    return [stream for stream in gpu.streams if any(name in stream.name for name in names)]


def rows_dropped_after_launch(transport: StreamTransport, stats: CommStats) -> Results:
    """Nobody but the transport keeps the rows of a message: the compute stream could reuse their memory."""
    rows = torch.arange(NUM_ROWS * WIDTH, dtype=torch.float32).view(NUM_ROWS, WIDTH)
    sent = rows.cuda() + 1
    received = torch.empty_like(sent)
    transfer = transport.launch(received, sent, ROWS, ROWS)
    del sent
    others = [torch.zeros(NUM_ROWS, WIDTH, device="cuda") for _ in range(4)]
    transfer.wait()
    return {"rows": (received * 2, 2 * (rows + 1)), "others": (others[-1], torch.zeros(NUM_ROWS, WIDTH))}


def received_dropped_after_use(transport: StreamTransport, stats: CommStats) -> Results:
    """Received rows in memory of the communication stream are dropped when the kernel that reads them is enqueued."""
    rows = torch.arange(NUM_ROWS * WIDTH, dtype=torch.float32).view(NUM_ROWS, WIDTH)
    results = {}
    for message in range(2):
        sent = rows.cuda() + message
        ready = ReadyEvent(sent)
        torch.zeros(NUM_ROWS, WIDTH, device="cuda")  # compute goes on; the message does not wait for it
        received = transport.empty_receive(sent.shape, sent)
        transfer = transport.launch(received, sent, ROWS, ROWS, ready)
        transfer.wait()
        results[f"rows {message}"] = (received * 2, 2 * (rows + message))
        del received, transfer
    return results


def counts_dropped_after_launch(transport: StreamTransport, stats: CommStats) -> Results:
    """What the counts are made of is dropped behind the wait, and the received counts when they have been read."""
    results = {}
    for exchange in range(2):
        routing = torch.full((NUM_ROWS, NUM_RANKS), 1 + exchange, device="cuda") * 2
        counts = transport.exchange_counts(partial(routing.sum, dim=0), ReadyEvent(routing))
        others = [torch.zeros(NUM_ROWS, NUM_RANKS, device="cuda", dtype=torch.int64) for _ in range(2)]
        found = counts.wait()
        del routing
        expected = NUM_ROWS * 2 * (1 + exchange)
        assert found.received == found.sent == [[expected]] * NUM_RANKS, found.received
        results[f"counts {exchange}"] = (found.received_on_device + others[-1][0, 0], torch.full((4, 1), expected))
        del found, counts
    return results


def times_read_at_once(transport: StreamTransport, stats: CommStats) -> Results:
    """The counters of a step are read while the device still works."""
    rows = torch.ones(NUM_ROWS, WIDTH)
    sent = rows.cuda()
    received = torch.empty_like(sent)
    transport.launch(received, sent, ROWS, ROWS).wait()
    assert stats.take().all_to_all_ms == 0.0
    return {"rows": (received, rows)}


def forward_on_lane(transport: StreamTransport, stats: CommStats) -> Results:
    """A forward runs on the lane's thread, whose current stream would be another one."""
    rows = torch.ones(NUM_ROWS, WIDTH)
    stream, starts_on = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(starts_on)
    with torch.cuda.stream(stream):
        prepared = rows.cuda() * 2
        lane = ForwardLane(on_cuda=True)
        forward = lane.add(lambda: prepared + 1)
        lane.run_turn()
        result = forward.take_result() * 2
    starts_on.wait_stream(stream)
    return {"rows": (result, 6 * rows)}


PROGRAMS = {
    "rows-dropped": Program(rows_dropped_after_launch),
    "received-dropped": Program(received_dropped_after_use),
    "counts-dropped": Program(counts_dropped_after_launch),
    "times-read": Program(times_read_at_once),
    "forward-lane": Program(forward_on_lane),
}
"""Programs by name."""
