"""Steps of a model in a mocked world, with and without a trace."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.profiler.facts import ProfiledModel
from megatron_lancet.profiler.measure import ProfileRun, plans_to_profile
from megatron_lancet.runtime.trace import Trace
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, fixed_plan, paired
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_world import mock_world
from tests.parity.gradients.gradients_worker import (
    MICRO_BATCH,
    NUM_MICRO_BATCHES,
    SEQ_LENGTH,
    build,
    overlapping_model,
    step,
    wrap_with_ddp,
)
from tests.parity.paired.paired_worker import step as scheduled_step

MODEL = {
    "expert_model_parallel_size": 4,
    "moe_layer_freq": [0, 1, 1],
    "moe_shared_expert_intermediate_size": 48,
}
PLANS: dict[str, Plan] = {
    "one-chunk": fixed_plan(1),
    "dw-at-once": fixed_plan(2, DwPolicy.NONE),
    "batch": fixed_plan(2),
    "bounded": fixed_plan(2, dw_memory_bytes=20_000),
    "sequence": fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE),
    "gate": fixed_plan(2, overlap_range=OverlapRange.GATE),
    "experts": fixed_plan(2, overlap_range=OverlapRange.EXPERTS),
    "paired": paired(fixed_plan(1)),
    "paired-dw-at-once": paired(fixed_plan(1, DwPolicy.NONE)),
    "paired-batch": paired(fixed_plan(2)),
    "paired-gate": paired(fixed_plan(2, overlap_range=OverlapRange.GATE)),
}
NODES = Nodes(2, 2)
"""How the four ranks lie, for the one of the profile's plans that has two hops."""
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LINK = Link(latency_us=300, gbytes_per_s=1)


class Model:
    """One model that runs by one plan after the other."""

    def __init__(self, overrides: dict[str, Any]) -> None:
        self.module, config, precision = build({**MODEL, **overrides})
        self.setup, self.stats = overlapping_model(self.module, fixed_plan(1), switchable=True, nodes=NODES)
        self.ddp = wrap_with_ddp(self.module, config, precision, deferred=True)

    def run(self, plan: Plan) -> dict[str, Any]:
        """A step without a trace, one with it, and one without again."""
        from megatron_lancet.features.pairing.schedules import paired_schedules

        self.setup.switch(plan)
        with paired_schedules(lambda: self.setup.stages) if plan.is_paired else nullcontext():
            return self._run(partial(scheduled_step, num_micro_batches=4) if plan.is_paired else step)

    def _run(self, step: Callable[[Any], list[float]]) -> dict[str, Any]:
        plain = step(self.ddp), gradients(self.module)
        self.stats.take()
        comm, trace = self.module.decoder.comm, Trace(torch.device("cpu"), 0)
        comm.record_to(trace)
        trace.begin_step()
        losses = step(self.ddp)
        found = trace.end_step()
        counted = self.stats.take()
        comm.record_to(None)
        num_entries = len(trace.log)
        equal = [ours.equal(theirs) for ours, theirs in zip(gradients(self.module), plain[1], strict=True)]
        again = step(self.ddp)
        return {
            "losses": [plain[0], losses, again],
            "num_micro_batches": len(losses),
            "counted": asdict(counted),
            "gradients_equal": all(equal),
            "spans": [asdict(span) for span in found.timeline.spans],
            "step_ms": found.timeline.step_ms,
            "received_rows": found.received_rows,
            "weight_grads": {name: asdict(facts) for name, facts in found.weight_grads.items()},
            "recorded_when_off": len(trace.log) - num_entries,
        }

    def profile(self) -> str:
        """A profile's JSON."""
        run = ProfileRun(
            ProfiledModel((self.module,), torch.device("cpu"), MICRO_BATCH, SEQ_LENGTH, NUM_MICRO_BATCHES),
            plans_to_profile(MICRO_BATCH, SEQ_LENGTH, chunk_counts=(2,), dispatches=[TWO_HOP]),
            num_traced_steps=2,
        )
        for index, plan in enumerate(run.plans):
            self.setup.switch(plan)
            with run.step(index):
                step(self.ddp)
        return run.finish().to_json()


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.main_grad.clone() for parameter in model.parameters()]


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    with mock_world(4, LINK):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=4)
        model = Model({})
        results: dict[str, Any] = {name: model.run(plan) for name, plan in PLANS.items()}
        results["profile"] = model.profile()
        results["recomputed"] = Model(RECOMPUTED).run(PLANS["batch"])
        parallel_state.destroy_model_parallel()
    return results
