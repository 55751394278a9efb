"""How much more memory a plan may take than the plans that have run."""

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
from megatron_lancet.planning.what_if.layout import split_at_stages
from megatron_lancet.schedule.plan import Plan

USABLE_SHARE = 0.9
"""Of the room that is left: the rest is lost between blocks, and to what a profile does not see."""
_BYTES_PER_RSS_UNIT = 1024


def least_room_bytes(device: torch.device) -> int:
    """Bytes beyond its highest use so far that the tightest rank can still get. Collective over the world."""
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
    """What a plan may keep of activations and deferred weight gradients: the most that has fitted, and the room left.

    None where the profile does not know what layers keep.
    """
    costs = CostModel(profile)
    if not costs.knows_memory:
        return None
    simulator = Simulator(costs)
    peaks = []
    for plan in plans_that_ran:
        try:
            peaks.append(simulator.predict(split_at_stages(plan, profile.model.stage_of_layer)).peak_bytes)
        except RecordError:  # a plan that the profile knows nothing of says nothing of its memory
            continue
    return max(peaks, default=0) + int(USABLE_SHARE * room_bytes)
