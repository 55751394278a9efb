"""The simulator against the virtual GPU: what the runtime has enqueued, played in time, takes as long as predicted.

The profile has the op times of the played step itself, so what is compared is the order of launches, messages, waits of
the host and weight gradients. Every kernel takes the same time here, and launching is free.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
import torch

from megatron_lancet.patching import around
from megatron_lancet.planning.link_times import LinkTimes
from megatron_lancet.planning.measured.op_times import Samples, op_times, weight_grad_times
from megatron_lancet.planning.profile import ModelFacts, Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.profiler.facts import ProfiledModel, model_facts
from megatron_lancet.report.exposed import waits_ms
from megatron_lancet.runtime.trace import StepTrace, WeightGradFacts
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.plan import DwPolicy, Plan, fixed_plan
from megatron_lancet.schedule.timeline import Lane, RankTimeline
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.virtual_gpu.log import Entry, HostWaits
from megatron_lancet.testkit.virtual_gpu.playback.by_op import is_weight_grad, timeline_of
from megatron_lancet.testkit.virtual_gpu.playback.device_model import DeviceModel
from megatron_lancet.testkit.virtual_gpu.playback.marks import MarkedMessage, MarkedTrace
from megatron_lancet.testkit.virtual_gpu.playback.player import play
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.platform.cpu import cpu_platform
from tests.parity.gradients.gradients_worker import MICRO_BATCH, NUM_MICRO_BATCHES
from tests.small_gpt import SEQ_LENGTH
from tests.virtual_gpu.case import Case, run

PLANS = {
    "k=1": fixed_plan(1),
    "k=2/dw-none": fixed_plan(2, DwPolicy.NONE),
    "k=2": fixed_plan(2),
    "k=4": fixed_plan(4),
}
KERNEL_US = 10.0
NUM_COUNTS_KERNELS = 3
"""Kernels during an exchange of counts: their sum, and the copies to the host."""
BOUND_BY_NOTHING = 1e30
CLOSE_MS = 0.3
"""Layers differ in a few kernels, and the simulator has their median."""


@dataclass
class Step:
    """What a step has enqueued."""

    log: list[Entry]
    messages: list[MarkedMessage]


@dataclass
class Recorded:
    """The steps by plan."""

    facts: ModelFacts | None = None
    steps: dict[str, Step] = field(default_factory=dict)

    def record(self, stack) -> None:
        def prepares(stock, setup, models):
            result = stock(setup, models)
            sizes = MICRO_BATCH, SEQ_LENGTH, NUM_MICRO_BATCHES
            self.facts = model_facts(ProfiledModel(tuple(setup.stages), torch.device("cuda"), *sizes))
            return result

        def traced(stock, setup, step):
            comm, gpu = setup.stages[0].decoder.comm, torch.cuda.current_stream().gpu
            trace = MarkedTrace(gpu)
            trace.begin_step()
            comm.record_to(trace)
            result = stock(setup, step)
            comm.record_to(None)
            self.steps[str(setup.plan)] = Step(list(gpu.log), trace.messages)
            return result

        stack.enter_context(around(OverlapSetup, "__call__", prepares))
        stack.enter_context(around(OverlapSetup, "check_step", traced))


@pytest.fixture(scope="module")
def recorded():
    result = Recorded()
    with mock.patch.dict(os.environ), cpu_platform():
        found = run(
            Case(list(PLANS.values()), {"num_layers": 2}, switchable=True, overlap_grad_reduce=False), result.record
        )
    assert not found.problems
    return result


def played(step: Step, message_us: float, host_wait_us: float) -> RankTimeline:
    """The step on a device of which every kernel and every message takes a fixed time."""
    device = DeviceModel(
        flops_per_s=BOUND_BY_NOTHING,
        bytes_per_s=BOUND_BY_NOTHING,
        min_kernel_us=KERNEL_US,
        link=Link(message_us, BOUND_BY_NOTHING),
    )
    device = replace(device.with_launch_us(0.0), host_wait_us=host_wait_us)
    # The simulator knows no waits of the host but those for counts, which are for an event.
    log = [entry for entry in step.log if not isinstance(entry, HostWaits) or entry.event is not None]
    return timeline_of(play(log, device), step.messages)


def simulated(
    plan: Plan, facts: ModelFacts, timeline: RankTimeline, message_us: float, host_wait_us: float, polls: bool
) -> RankTimeline:
    """The prediction for the op times of a played step."""
    names = {span.name for span in timeline.spans if span.lane is Lane.COMPUTE}
    received = {
        name: (facts.num_rows // plan.num_chunks,) * NUM_MICRO_BATCHES
        for name in names
        if name.endswith(f"F.{OpKind.EXPERTS}")
    }
    weight_grads = {name: WeightGradFacts((1,), 1) for name in names if is_weight_grad(name)}
    samples = Samples()
    samples.add(StepTrace(timeline, received, weight_grads), plan, facts)
    medians = samples.medians()
    message_ms = message_us / 1e3
    profile = Profile(
        model=facts,
        device="virtual",
        versions={},
        ops=op_times(medians, facts),
        weight_grads=weight_grad_times(medians, facts),
        link=LinkTimes(
            all_to_all=((0, message_ms), (1 << 30, message_ms)),
            counts_ms=(NUM_COUNTS_KERNELS * KERNEL_US + host_wait_us) / 1e3 + message_ms,
            sends_share_link=False,
            host_polls=polls,
        ),
        memory=(),
        rest_ms=medians.rest_ms,
        received_share=(1 / facts.ep_size,) * facts.ep_size,
        measured_steps_ms={},
    )
    return Simulator(CostModel(profile)).simulate(plan).timelines[0]


def differences_ms(ours: Mapping[str, float], others: Mapping[str, float]) -> list[float]:
    return [abs(ours.get(name, 0.0) - others.get(name, 0.0)) for name in ours.keys() | others.keys()]


@pytest.mark.parametrize("message_us", [20.0, 100.0, 400.0, 2000.0])
@pytest.mark.parametrize("host_wait_us", [0.0, 300.0])
@pytest.mark.parametrize("name", PLANS)
def test_simulator_predicts_what_the_runtime_enqueues(recorded, name, message_us, host_wait_us):
    plan = PLANS[name]
    step = recorded.steps[str(plan)]
    timeline = played(step, message_us, host_wait_us)
    prediction = simulated(plan, recorded.facts, timeline, message_us, host_wait_us, polls=False)
    assert prediction.step_ms == pytest.approx(timeline.step_ms, rel=0.01, abs=CLOSE_MS)
    assert prediction.exposed_ms() == pytest.approx(timeline.exposed_ms(), abs=CLOSE_MS)
    assert max(differences_ms(waits_ms([prediction]), waits_ms([timeline]))) <= CLOSE_MS


def test_simulator_of_a_host_that_polls_is_wrong_about_a_device(recorded):
    plan = PLANS["k=2/dw-none"]
    step = recorded.steps[str(plan)]
    timeline = played(step, 400.0, 1000.0)
    prediction = simulated(plan, recorded.facts, timeline, 400.0, 1000.0, polls=True)
    assert prediction.exposed_ms() < timeline.exposed_ms() - 4 * CLOSE_MS
