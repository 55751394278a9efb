"""What a clock would show of a plan: the median over replays at the paces that ranks had in the profile's own steps.

A simulation at an even pace is too fast. Ranks drift apart from op to op, and at every all-to-all the faster one waits
for the slower; so a plan is also played with each layer as fast, on each rank, as it was in a traced step.
(dPRO replays traces of all ranks for the same reason.)
"""

import statistics
from dataclasses import dataclass

from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.schedule.plan import Plan


@dataclass(frozen=True)
class ClockedStep:
    """What is to be measured.

    Attributes:
        step_ms: of a step, on the slowest rank.
        exposed_ms: part of it in which compute waits for messages, mean over ranks.
    """

    step_ms: float
    exposed_ms: float


def expect(profile: Profile, plan: Plan) -> ClockedStep:
    """Medians over the profile's paces; at an even pace where it has none, or not those of all ranks.

    Raises:
        RecordError: plan and profile don't fit together.
    """
    simulator = Simulator(CostModel(profile))
    num_ranks = len(simulator.loads.simulated)
    paces = [pace for pace in profile.paces if len(pace.forward[0]) == num_ranks == profile.model.ep_size]
    if paces:
        steps, exposed = zip(*(simulator.replay(plan, pace) for pace in paces), strict=True)
        return ClockedStep(statistics.median(steps), statistics.median(exposed))
    simulation = simulator.simulate(plan)
    waits = [
        timeline.exposed_ms()
        for timeline, same in zip(simulation.timelines, simulation.same_ranks, strict=True)
        for _ in range(same)
    ]
    return ClockedStep(simulation.prediction.step_ms, statistics.fmean(waits))
