"""Profile runs whose result is known, and plan makers that use them."""

from contextlib import contextmanager
from dataclasses import replace

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.planning.stages import split_at_stages
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.plan import ChunkDim, OverlapRange, fixed_plan

MACHINE = Machine()
PROFILE = replace(synthetic_profile(MACHINE), measured_steps_ms={str(fixed_plan(2)): 44.0, "another": 1.0})
PRESENT = fixed_plan(4)
FEW = Limits(chunk_dims=(ChunkDim.BATCH,), ranges=(OverlapRange.STACK,), dw_window_layers=(1,))
"""The planner's own tests search larger spaces."""
BATCH = replace(FEW, dispatches=(PLAIN,), tiles=(0,))


class Run:
    """A profile run whose result is known."""

    result = PROFILE
    room_bytes = 1 << 40
    num_micro_batches = 2
    adds_plans = False
    started: list = []

    def __init__(self, model, plans, num_traced_steps=1) -> None:
        Run.started.append((list(plans), num_traced_steps))
        self.plans = [plan for plan in plans for _ in range(num_traced_steps)]

    @contextmanager
    def step(self, index):
        yield

    def finish(self):
        if not self.adds_plans:
            return self.result
        known = self.result.measured_steps_ms
        return replace(self.result, measured_steps_ms={str(plan): known.get(str(plan), 44.0) for plan in self.plans})


def profiled(maker, again: bool = False):
    maker.begin(again)
    num_steps = 0
    while maker.next_plan() is not None:
        assert maker.run_step(lambda: "result") == "result"
        num_steps += 1
    return maker.make(), num_steps


def best(planned):
    return planned.finalists[0].plan


def with_step(profile, share: float = 1.0):
    """The profile of two steps of the present plan, which take this share of the predicted time."""
    present = split_at_stages(PRESENT, profile.model.stage_of_layer)
    predicted_ms = Simulator(CostModel(profile)).expected_step(present).step_ms
    return replace(profile, measured_steps_ms={str(PRESENT): share * predicted_ms})
