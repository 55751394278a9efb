"""The memory that a plan may use, from the plans that have run and the memory that is left."""

import os
import resource
from collections.abc import Sequence

import psutil
import torch
import torch.distributed as dist

from megatron_lancet.files import RecordError
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.planning.stages import split_at_stages
from megatron_lancet.schedule.plan import Plan

USABLE_SHARE = 0.9
"""Share of the memory left that plans may use: the rest is lost to fragmentation and to what profiles do not see."""
_BYTES_PER_RSS_UNIT = 1024


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
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_RSS_UNIT
    return max(0, free_bytes + held_bytes - peak_bytes)


def memory_bound_bytes(profile: Profile, plans_that_ran: Sequence[Plan], room_bytes: int) -> int | None:
    """Most bytes that a plan's activations and deferred weight gradients may take: the peak so far and the free memory.

    Args:
        room_bytes: bytes that can be allocated beyond the peak so far.

    Returns:
        None where the profile has no memory figures.
    """
    costs = CostModel(profile)
    if not costs.knows_memory:
        return None
    simulator = Simulator(costs)
    peaks = []
    for plan in plans_that_ran:
        try:
            peaks.append(simulator.predict(split_at_stages(plan, profile.model.stage_of_layer)).peak_bytes)
        except RecordError:  # the profile lacks ops of this plan, so its peak is unknown
            continue
    return max(peaks, default=0) + int(USABLE_SHARE * room_bytes)
