"""A model on the virtual GPU, recorded once, and its profile at any launch cost and speed: no step is run again.

Kernel times are an H100's, by FLOP and bytes. A device that is N times as fast stands for a micro-batch with 1 / N
of the tokens.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from unittest import mock

import torch

from megatron_lancet.lab.modelled_step.recording import Recording, record
from megatron_lancet.lab.modelled_step.settings import ModelledRun, modelled_run
from megatron_lancet.patching import around
from megatron_lancet.planning.link_times import LinkTimes
from megatron_lancet.planning.measured.op_times import Samples, launch_bound_ms, op_times, weight_grad_times
from megatron_lancet.planning.profile import ModelFacts, Profile
from megatron_lancet.profiler.facts import ProfiledModel, model_facts
from megatron_lancet.runtime.trace import StepTrace, WeightGradFacts
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.plan import ChunkDim, Plan, fixed_plan
from megatron_lancet.schedule.timeline import Lane
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.virtual_gpu.playback.by_op import host_spans, is_weight_grad, timeline_of
from megatron_lancet.testkit.virtual_gpu.playback.device_model import DeviceModel
from megatron_lancet.testkit.virtual_gpu.playback.player import Playback, play
from megatron_lancet.training.overlap_setup import OverlapSetup

MODEL = (
    "--num-layers 2 --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 16 --micro-batch-size 1 "
    "--global-batch-size 64 --train-iters 10 --lr 1e-4 --bf16 --transformer-impl local --num-experts 32 "
    "--moe-ffn-hidden-size 1024 --moe-router-topk 4 --moe-router-load-balancing-type none "
    "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --untie-embeddings-and-output-weights --lancet-num-chunks 1 --seq-length 8192 "
    "--max-position-embeddings 8192"
)
NUM_TOKENS = 8192
ONE, TWO = fixed_plan(1), fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE)
NUM_MICRO_BATCHES = 8
_LARGE = 1 << 30
_EVENTS_OF_LAUNCH = 3


@dataclass(frozen=True)
class Recorded:
    """A micro-batch under each plan that a profile has.

    Attributes:
        facts: of a step of one micro-batch.
    """

    facts: ModelFacts
    steps: dict[Plan, Recording]

    def played(self, plan: Plan, device: DeviceModel) -> Playback:
        """A micro-batch on a device."""
        return play(self.steps[plan].log, device)

    def profile(self, device: DeviceModel, plans: Sequence[Plan] = (ONE, TWO)) -> Profile:
        """What the profiler would find on a device in steps of these plans."""
        samples, bound = Samples(), {}
        for plan in plans:
            recording = self.steps[plan]
            step = self._traced(plan, recording, device)
            samples.add(step, plan, self.facts)
            bound[str(plan)] = launch_bound_ms(step) / step.timeline.step_ms
        medians, facts, link = samples.medians(), self.facts, device.link
        return Profile(
            model=replace(facts, num_micro_batches=NUM_MICRO_BATCHES),
            device="virtual",
            versions={},
            ops=op_times(medians, facts),
            weight_grads=weight_grad_times(medians, facts),
            link=LinkTimes(
                all_to_all=tuple((size, link.time_us(size) / 1e3) for size in (0, _LARGE)),
                counts_ms=(device.counts_us + link.time_us(facts.counts_bytes)) / 1e3,
                sends_share_link=False,
                host_polls=False,
                launch_ms=(device.collective_us + _EVENTS_OF_LAUNCH * device.event_us) / 1e3,
            ),
            memory=(),
            rest_ms=0.0,
            received_share=(1 / facts.ep_size,) * facts.ep_size,
            measured_steps_ms={},
            launch_bound=bound,
        )

    def _traced(self, plan: Plan, recording: Recording, device: DeviceModel) -> StepTrace:
        played = play(recording.log, device)
        timeline = timeline_of(played, recording.messages)
        names = {span.name for span in timeline.spans if span.lane is Lane.COMPUTE}
        rows = self.facts.num_rows // plan.num_chunks
        received: dict[str, tuple[int, ...]] = {name: (rows,) for name in names if name.endswith(f"F.{OpKind.EXPERTS}")}
        weight_grads = {name: WeightGradFacts((1,), 1) for name in names if is_weight_grad(name)}
        return StepTrace(timeline, received, weight_grads, host=host_spans(played))


def recorded() -> Recorded:
    """Records the micro-batches. Enter it inside ``cpu_platform()``, with ``WORLD_SIZE`` 8."""
    with mock.patch.object(sys, "argv", ["launch", *MODEL.split()]), redirect_stdout(StringIO()):
        run = modelled_run()
    facts: list[ModelFacts] = []
    steps = {plan: _recording(run, plan, facts) for plan in (ONE, TWO)}
    return Recorded(facts[0], steps)


def _recording(run: ModelledRun, plan: Plan, facts: list[ModelFacts]) -> Recording:
    def prepares(stock, setup, models):
        result = stock(setup, models)
        facts.append(model_facts(ProfiledModel(tuple(setup.stages), torch.device("cuda"), 1, NUM_TOKENS, 1)))
        return result

    with ExitStack() as stack:
        stack.enter_context(around(OverlapSetup, "__call__", prepares))
        return record(run.with_layers(run.num_layers), plan)


def device(launch_us: float, speed: float = 1.0) -> DeviceModel:
    """
    Args:
        launch_us: time in which the host launches a kernel.
        speed: of the device and its link, relative to an H100.
    """
    slow = DeviceModel()
    fast = DeviceModel(
        flops_per_s=speed * slow.flops_per_s,
        bytes_per_s=speed * slow.bytes_per_s,
        link=Link(slow.link.latency_us, speed * slow.link.gbytes_per_s),
    )
    return fast.with_launch_us(launch_us)
