"""What the planner's simulator predicts for the variants, from op times of their modelled steps."""

from dataclasses import replace
from typing import Any

from benchmarks.gpu.check.predict.recorded import Step, device_model
from megatron_lancet.planning.link_times import LinkTimes
from megatron_lancet.planning.measured.op_times import Samples, op_times, weight_grad_times
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.runtime.trace import StepTrace
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.virtual_gpu.log import HostWaits
from megatron_lancet.testkit.virtual_gpu.playback.by_op import timeline_of
from megatron_lancet.testkit.virtual_gpu.playback.player import play

_LARGE = 1 << 30
"""Bytes of a message; its time and the latency give the time of all others."""


type PlannedStep = tuple[Plan, Step]
"""A recorded step without pairs, and its plan."""


def simulated(plan: Plan, own: PlannedStep, whole: PlannedStep, bytes_per_s: float, link: Link) -> dict[str, float]:
    """Figures of a plan's step by the simulator.

    Launching is free there. Messages slow down compute by the share of multiprocessors that they take.

    Args:
        own: the plan's own step or, with pairs, the step of the same chunks without pairs.
        whole: the step of one chunk, from which the cost model starts.
        link: a free one copies the data at the memory's speed.
    """
    prediction = Simulator(CostModel(_profile(own, whole, bytes_per_s, link))).simulate(plan).prediction
    return {"step_ms": round(prediction.step_ms, 3), "exposed_ms": round(prediction.exposed_ms, 3)}


def _profile(own: PlannedStep, whole: PlannedStep, bytes_per_s: float, link: Link) -> Profile:
    device = device_model(bytes_per_s, link)
    facts = own[1].facts
    assert facts is not None
    assert facts == whole[1].facts
    of_own, of_all = Samples(), Samples()
    for samples, steps in ((of_own, [own]), (of_all, [whole] if own is whole else [whole, own])):
        for plan, step in steps:
            samples.add(_alone(step, bytes_per_s, link), plan, facts)
    found = of_own.medians()
    # Weight gradients have other names in a plan whose experts are not one grouped product, so the plan's own count.
    medians = replace(found, op_ms=of_all.medians().op_ms, received=of_all.medians().received)
    if link == Link():
        to_others = 1 - 1 / facts.ep_size  # a rank's local rows are also copied, and each is read and written
        link = Link(device.min_kernel_us, bytes_per_s / 2 * to_others / 1e9)
    counts_us = device.counts_us + link.time_us(facts.counts_bytes)
    return Profile(
        model=facts,
        device="modelled",
        versions={},
        ops=op_times(medians, facts),
        weight_grads=weight_grad_times(medians, facts),
        link=LinkTimes(
            all_to_all=tuple((size, link.time_us(size) / 1e3) for size in (0, _LARGE)),
            counts_ms=counts_us / 1e3,
            sends_share_link=False,
            compute_slowdown=1 / device.speed_beside_message,
            host_polls=False,
        ),
        memory=(),
        rest_ms=medians.rest_ms,
        received_share=(1 / facts.ep_size,) * facts.ep_size,
        measured_steps_ms={},
    )


def _alone(step: Step, bytes_per_s: float, link: Link) -> Any:
    """A step whose kernels take as long as with no concurrent message, and whose host only waits for counts."""
    device = device_model(bytes_per_s, link)
    free = replace(device.with_launch_us(0), host_wait_us=device.host_wait_us, message_sms=0)
    # The simulator knows no waits of the host but those for counts, which are for an event.
    log = [entry for entry in step.log if not isinstance(entry, HostWaits) or entry.event is not None]
    return StepTrace(timeline_of(play(log, free), step.messages), step.received_rows, step.weight_grads)
