"""Weight gradients on the virtual GPU: which of them the host enqueues in front of which wait, and by which kernels."""

import os
from dataclasses import dataclass, field
from unittest import mock

import pytest

from megatron_lancet.patching import around
from megatron_lancet.runtime.weight_grad_store import DeferredWeight, WeightGradStore
from megatron_lancet.schedule.plan import Gap, Plan, fixed_plan, paired
from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu
from megatron_lancet.testkit.virtual_gpu.log import Kernel
from megatron_lancet.training.platform.cpu import cpu_platform
from tests.virtual_gpu.case import Case, Found, run
from tests.virtual_gpu.cases import FORWARD_GAPS, paired_case

QKV, PROJ = "L3.W.self_attention.linear_qkv", "L3.W.self_attention.linear_proj"
GAPS = (
    Gap("L3.c1.I.combine", ("W.output_layer",)),
    Gap("L2.c1.I.combine", (QKV, "W.no_such_layer", PROJ, QKV)),
    Gap("L2.c0.I.dispatch", (PROJ,)),
)
UNBOUNDED_WINDOW = 100


@dataclass
class Recorded:
    """
    Attributes:
        enqueued: names of weight gradients by the all-to-all in front of whose wait they were enqueued.
        kernels: names of those that weight gradients enqueued, one list for each.
    """

    found: Found | None = None
    enqueued: dict[str, list[str]] = field(default_factory=dict)
    kernels: list[list[str]] = field(default_factory=list)
    _gap: str = ""
    _is_in_product: bool = False

    def record(self, stack) -> None:
        def begins_gap(stock, store, op):
            self._gap = str(op)
            stock(store, op)

        def runs_in_gap(stock, store, task):
            self.enqueued.setdefault(self._gap, []).append(task.names[0])
            stock(store, task)

        def adds(stock, *args):
            self.kernels.append([])
            self._is_in_product = True
            stock(*args)
            self._is_in_product = False

        def notes(stock, gpu, entry):
            if self._is_in_product and isinstance(entry, Kernel):
                self.kernels[-1].append(entry.name)
            stock(gpu, entry)

        stack.enter_context(around(WeightGradStore, "run_ahead", begins_gap))
        stack.enter_context(around(WeightGradStore, "run_planned", begins_gap))
        stack.enter_context(around(WeightGradStore, "_run_in_gap", runs_in_gap))
        stack.enter_context(around(DeferredWeight, "add_product", adds))
        stack.enter_context(around(VirtualGpu, "note", notes))


@pytest.fixture(scope="module")
def recorded():
    """Steps in bf16 with fp32 gradients, under a plan in which no weight gradient becomes due before the end."""
    result = Recorded()
    plan = Plan(fixed_plan(2).segments, dw_window=UNBOUNDED_WINDOW, gaps=GAPS)
    with mock.patch.dict(os.environ), cpu_platform():
        result.found = run(Case([plan], {"bf16": True}), result.record)
    return result


@pytest.fixture(scope="module")
def recorded_in_pairs():
    result = Recorded()
    plan = Plan(fixed_plan(1).segments, dw_window=UNBOUNDED_WINDOW, gaps=FORWARD_GAPS[:3])
    with mock.patch.dict(os.environ), cpu_platform():
        result.found = run(paired_case([paired(plan)]), result.record)
    return result


def test_weight_grads_on_streams_are_ordered_and_right(recorded):
    assert not recorded.found.problems
    assert max(recorded.found.gradients.values()) < 0.05  # bf16


def test_planned_weight_grads_are_enqueued_before_their_waits(recorded):
    num_passes = len(recorded.enqueued[GAPS[0].op])
    assert num_passes > 1
    expected = {gap.op: [name for name in gap.weight_grads if "no_such" not in name] for gap in GAPS}
    assert recorded.enqueued == {op: num_passes * names for op, names in expected.items()}


def test_weight_grads_are_enqueued_before_waits_of_a_forward(recorded_in_pairs):
    num_pairs, num_steps = 2, 2
    expected = {gap.op: num_steps * num_pairs * list(gap.weight_grads) for gap in FORWARD_GAPS[:3]}
    assert recorded_in_pairs.enqueued == expected
    assert not recorded_in_pairs.found.problems
    assert recorded_in_pairs.found.largest_error == 0


def test_weight_grads_of_bf16_are_one_kernel_each(recorded):
    """No product goes to memory to be added afterwards. Before the watched step nothing is a kernel."""
    watched = [names for names in recorded.kernels if names]
    assert len(watched) > 20
    assert watched == [["addmm"]] * len(watched)
