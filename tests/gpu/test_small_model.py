"""One small model on the device against stock: gradients under DDP, deferred dWs, counts, a traced step."""

import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.model.local_experts import grouped_linear
from megatron_lancet.runtime.device import has_grouped_gemm
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, fixed_plan, paired
from megatron_lancet.schedule.timeline import Lane
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_world import mock_world
from tests.gpu.devices import ON_BOTH, on_both_with
from tests.gpu.small_model import TOLERANCE, compare
from tests.parity.gradients.gradients_worker import NUM_MICRO_BATCHES

CUDA = torch.device("cuda")
NUM_RANKS, EP = 8, 4
LINK = Link(latency_us=50, gbytes_per_s=50)
LAYERS = (1, 2)
PLANS = {
    "k=1": [fixed_plan(1)],
    "k=2": [fixed_plan(2)],
    "k=4": [fixed_plan(4)],
    "sequence": [fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE)],
    "experts": [fixed_plan(2, overlap_range=OverlapRange.EXPERTS)],
    "dw-at-once-then-deferred": [fixed_plan(1, DwPolicy.NONE), fixed_plan(2)],
    "deferred-then-dw-at-once": [fixed_plan(2), fixed_plan(2, DwPolicy.NONE)],
    "paired": [paired(fixed_plan(1))],
    "paired-chunks-at-ends": [paired(fixed_plan(1), fixed_plan(2))],
    "dedup": [replace(fixed_plan(2), dispatch=DEDUP)],
}


@contextmanager
def mocked_world():
    from megatron.core import parallel_state

    from megatron_lancet.training.megatron.mock_patches import loopback_counts

    with mock_world(NUM_RANKS, LINK), loopback_counts():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=EP, create_gloo_process_groups=False)
        try:
            yield {"expert_model_parallel_size": EP}
        finally:
            parallel_state.destroy_model_parallel()


@contextmanager
def world_of_one(device, folder):
    from megatron.core import parallel_state

    with device.group_of_one(folder):
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        try:
            yield {"expert_model_parallel_size": 1}
        finally:
            parallel_state.destroy_model_parallel()


@on_both_with("plans", PLANS, ("k=2", "dw-at-once-then-deferred", "paired", "dedup"))
def test_fp32_gradients_equal_stock_in_a_mocked_world(device, plans):
    with mocked_world() as settings:
        found = compare(PLANS[plans], settings, CUDA, device.watch)
    assert found.loss <= TOLERANCE
    assert max(found.gradients.values()) <= TOLERANCE
    assert set(found.num_reports) == {2 * NUM_MICRO_BATCHES}  # once in every backward pass


@ON_BOTH
def test_fp32_gradients_equal_stock_in_a_group_of_one(device, tmp_path):
    """On a device NCCL's collectives run, though a rank sends to itself alone."""
    with world_of_one(device, tmp_path) as settings:
        found = compare([fixed_plan(2)], settings, CUDA, device.watch)
    assert found.loss <= TOLERANCE
    assert max(found.gradients.values()) <= TOLERANCE
    assert found.times.num_all_to_alls == len(LAYERS) * 2 * 2 * 2 * NUM_MICRO_BATCHES


@on_both_with("activation", ("plain", "gated"), ("gated",))
def test_bf16_gradients_are_as_close_to_fp32_as_stock(device, activation):
    """Where the device has them, experts run grouped products of bf16, and dWs add to fp32 inside the GEMM."""
    settings = {"bf16": True, "num_moe_experts": 16, "gated_linear_unit": activation == "gated"}
    is_grouped = has_grouped_gemm(torch.ones(1, dtype=torch.bfloat16, device="cuda"))
    grouped = mock.patch.object(grouped_linear, "grouped_mm", wraps=grouped_linear.grouped_mm)
    with mocked_world() as world, grouped as calls:
        found = compare([fixed_plan(2)], {**settings, **world}, CUDA, device.watch)
    of_stock, of_ours = found.fp32_errors
    assert all(map(math.isfinite, of_stock.values()))
    # On a device kernels of other sizes round in other ways, and a token on the edge between two experts, of the few
    # that there are, goes to the other one. A lost chunk or weight gradient is an error of 0.5 or more.
    extra = 0.02 if device.is_virtual else 0.25
    for name, error in of_ours.items():
        assert error <= 2 * of_stock[name] + extra, name
    assert (calls.call_count > 0) == is_grouped


@ON_BOTH
def test_traced_step_has_every_message_wait_and_deferred_dw(device):
    with mocked_world() as settings:
        found = compare([fixed_plan(2)], settings, CUDA, device.watch)
    spans = found.trace.timeline.spans
    messages = Counter(span.name for span in spans if span.lane is Lane.COMM)
    expected = [
        f"L{layer}.c{c}.{phase}.{kind}"
        for layer in LAYERS
        for c in (0, 1)
        for phase in "FI"
        for kind in ("dispatch", "combine")
    ]
    counts = [f"L{layer}.c{c}.F.counts" for layer in LAYERS for c in (0, 1)]
    assert messages == dict.fromkeys([*expected, *counts], NUM_MICRO_BATCHES)
    waits = {span.name for span in spans if span.lane is Lane.WAIT}
    assert waits >= set(expected)
    num_dws = sum(len(facts.pinned_bytes) for facts in found.trace.weight_grads.values())
    assert num_dws == found.times.num_dw_in_gaps + found.times.num_dw_early + found.times.num_dw_late > 0
    assert all(span.end_ms >= span.start_ms for span in spans)
