"""Selects the transport for a device and a group of ranks."""

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.base import Transport
from megatron_lancet.runtime.transport.gloo import PerSenderTransport
from megatron_lancet.runtime.transport.group import GroupTransport
from megatron_lancet.runtime.transport.local import LocalTransport
from megatron_lancet.runtime.transport.nccl import StreamTransport


def make_transport(
    ep_group: dist.ProcessGroup,
    counts_group: dist.ProcessGroup,
    device: torch.device,
    stats: CommStats,
    timeout: timedelta,
) -> Transport:
    """Returns the transport for the device. Collective over all ranks of the world.

    Args:
        ep_group: ranks that exchange rows.
        counts_group: ranks that exchange token counts: ``ep_group``, and with expert tensor parallelism also the ranks
            that hold the other parts of the experts.
        timeout: time for which a rank waits for the others; NCCL keeps the group's own.
    """
    if device.type == "cuda":
        return StreamTransport(ep_group, counts_group, stats)
    if dist.get_backend(ep_group) == "mock":  # of megatron_lancet.testkit.mock
        return GroupTransport(ep_group, stats)
    if counts_group.size() == 1:
        return LocalTransport()
    return PerSenderTransport(ep_group, counts_group, stats, timeout)
