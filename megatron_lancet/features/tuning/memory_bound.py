"""The memory that a plan may use, from the plans that have run and the memory that is left."""

from collections.abc import Sequence

from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.planning.stages import split_at_stages
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.plan.memory_budget import USABLE_SHARE


def memory_bound_bytes(profile: Profile, plans_that_ran: Sequence[Plan], room_bytes: int) -> int | None:
    """Most bytes that a plan's activations and deferred weight gradients may take: the peak so far and the free memory.

    Args:
        plans_that_ran: plans of the steps since the peak was reset.
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
