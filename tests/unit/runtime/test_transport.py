"""The order in which a message's parts are handed to gloo."""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron_lancet.runtime.transport import gloo
from megatron_lancet.runtime.transport.gloo import PerSenderTransport


def test_gloo_receives_are_posted_before_the_local_rows_are_sent(monkeypatch):
    """Without the yield between them, messages came 15 ms late where gloo's threads share a core with compute."""
    log = []

    def exchange(received, sent, receive_rows, send_rows, group):
        log.append(f"from {group[-1]}" if len(received) else "send")
        future = SimpleNamespace(add_done_callback=lambda callback: None)
        return SimpleNamespace(is_completed=lambda: False, get_future=lambda: future)

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2])
    monkeypatch.setattr(gloo, "new_groups", lambda ranks, copies, timeout, backend: [f"{i}" for i in range(copies)])
    monkeypatch.setattr(gloo, "_exchange", exchange)
    monkeypatch.setattr(os, "sched_yield", lambda: log.append("yield"))
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 3)
    sent, received = torch.arange(6.0), torch.zeros(6)
    PerSenderTransport(group, group, None, None).launch(received, sent, [1, 3, 2], [1, 3, 2])
    assert log == ["from 0", "from 2", "yield", "send"]
    assert received.tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 0.0]
