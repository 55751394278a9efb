"""Random exchanges over the per-sender transport against torch's own all-to-all, with ranks out of step."""

import random
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.runtime.transport.gloo import PerSenderTransport
from tests.fakes import cpu_stats
from tests.ranks import launch

pytestmark = pytest.mark.distributed

NUM_EXCHANGES, MAX_ROWS, LOCAL_EXPERTS = 40, 50, 3


def exchanges() -> dict[str, Any]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    stats = cpu_stats()
    transport = PerSenderTransport(dist.group.WORLD, dist.group.WORLD, stats, timedelta(minutes=1))
    shared = random.Random(0)  # the table of rows is known to all ranks
    own = random.Random(rank)
    in_flight, num_wrong = [], 0
    for i in range(NUM_EXCHANGES):
        rows = [[shared.choice([0, 1, shared.randrange(MAX_ROWS)]) for _ in range(num_ranks)] for _ in range(num_ranks)]
        if i == 5:
            rows[0] = [0] * num_ranks  # rank 0 has nothing to send
        if i == 6:
            rows = [[0] * num_ranks for _ in range(num_ranks)]  # nobody has
        send, receive = rows[rank], [row[rank] for row in rows]
        sent = torch.randn(sum(send), 4, 2)
        expected, received = (torch.empty(sum(receive), 4, 2) for _ in range(2))
        dist.all_to_all_single(expected, sent, receive, send)
        time.sleep(own.random() * 3e-3)
        in_flight.append((transport.launch(received, sent, receive, send), received, expected))
        if len(in_flight) == 3:  # several are on the wire at a time
            num_wrong += landed_wrong(*in_flight.pop(0))
    num_wrong += sum(landed_wrong(*flight) for flight in in_flight)

    counts = torch.arange(num_ranks * LOCAL_EXPERTS) + 100 * rank
    known = transport.exchange_counts(lambda: counts, ReadyEvent(counts)).wait()
    own_experts = torch.arange(LOCAL_EXPERTS) + LOCAL_EXPERTS * rank
    expected_counts = own_experts + 100 * torch.arange(num_ranks)[:, None]
    times = stats.take()
    return {
        "num_wrong": num_wrong,
        "counts_right": known.sent == counts.view(num_ranks, -1).tolist()
        and known.received == expected_counts.tolist(),
        "times_plausible": times.all_to_all_ms > 0,
    }


def landed_wrong(transfer, received: torch.Tensor, expected: torch.Tensor) -> bool:
    transfer.wait()
    return not (received.equal(expected) and transfer.done())


def test_transport_delivers_rows_of_any_size_and_skew(tmp_path):
    for result in launch.results_of(exchanges, 3, tmp_path):
        assert result == {"num_wrong": 0, "counts_right": True, "times_plausible": True}
