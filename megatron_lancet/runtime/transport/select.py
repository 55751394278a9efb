"""Which transport a device and a group of ranks get."""

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
    """The transport for the device. Collective over all ranks of the world.

    Args:
        ep_group: ranks between which rows travel.
        counts_group: ranks that must know each other's token counts: ``ep_group``, and where experts are cut by
            tensor parallelism, the ranks that hold the other parts of them.
        timeout: how long a rank waits for the others; NCCL keeps the group's own.
    """
    if device.type == "cuda":
        return StreamTransport(ep_group, counts_group, stats)
    if dist.get_backend(ep_group) == "mock":  # of megatron_lancet.mock
        return GroupTransport(ep_group, stats)
    if counts_group.size() == 1:
        return LocalTransport()
    return PerSenderTransport(ep_group, counts_group, stats, timeout)
