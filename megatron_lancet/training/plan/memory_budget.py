"""The memory that is left on every rank."""

import os
import resource

import psutil
import torch
import torch.distributed as dist

USABLE_SHARE = 0.9
"""Share of the memory left that plans may use: the rest is lost to fragmentation and to what profiles do not see."""


def least_room_bytes(device: torch.device) -> int:
    """Bytes that every rank can allocate beyond its peak so far. Collective over the world."""
    rooms = [0] * dist.get_world_size()
    dist.all_gather_object(rooms, _room_bytes(device))
    return min(rooms)


def _room_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        held_bytes, peak_bytes = torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)
    else:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        free_bytes = psutil.virtual_memory().available // ranks_here
        held_bytes = psutil.Process().memory_info().rss
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in kilobytes
    return max(0, free_bytes + held_bytes - peak_bytes)
