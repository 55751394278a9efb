"""Every parameter's gradient and every logged loss: ours against stock, with 8, 16 and 64 expert-parallel ranks."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.patching import replaced
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import Plan, fixed_plan
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_world import mock_world
from tests.features.dedup.cases import dedup
from tests.gradient_deviations import TOLERANCE
from tests.parity.gradients.disturbances import naive_aux_loss
from tests.parity.gradients.gradients_worker import NUM_MICRO_BATCHES, compare, compare_plan, logged_losses, run_stock
from tests.parity.gradients.variants import VARIANTS
from tests.ranks import launch

pytestmark = pytest.mark.timeout(420)

NUM_CHUNKS = (1, 3)
ROUTERS = ("plain", "seq-aux-loss", "global-aux-loss", "sigmoid-expert-bias", "top-1", "shared-expert")
WORLDS = {8: 16, 64: 64}
"""Experts by number of ranks."""
NODES = {16: Nodes(2, 8), 64: Nodes(8, 8)}
"""By number of ranks, for two hops."""
SIZES = sorted({*WORLDS, *NODES})
SLOW_ENOUGH = Link(latency_us=100, gbytes_per_s=1)
"""Messages are still on their way when somebody first asks."""


def cases(num_ranks: int) -> dict[str, tuple[dict[str, Any], int]]:
    """Overrides of the config and chunks, by name."""
    named = {
        f"{name}/k={k}": ({"num_moe_experts": WORLDS[num_ranks], **VARIANTS[name]}, k)
        for name in ROUTERS
        for k in NUM_CHUNKS
    }
    named["more-experts/k=3"] = ({"num_moe_experts": 2 * WORLDS[num_ranks]}, 3)
    return {f"ep={num_ranks}/{name}": case for name, case in named.items()}


def plan_cases(num_ranks: int) -> dict[str, tuple[dict[str, Any], Plan]]:
    """With the deduplicated dispatch and two hops: overrides of the config and plans, by name."""
    many = {"num_moe_experts": 2 * num_ranks, "moe_router_topk": 4}
    one, two = (fixed_plan(num_chunks, dispatch=TWO_HOP) for num_chunks in (1, 2))
    found: dict[str, tuple[dict[str, Any], Plan]] = {}
    if num_ranks in WORLDS:
        top_4 = {"num_moe_experts": 2 * WORLDS[num_ranks], "moe_router_topk": 4}
        found[f"ep={num_ranks}/top-4-dedup/k=2"] = top_4, dedup(fixed_plan(2))
    if num_ranks in NODES:
        shared = {**many, **VARIANTS["shared-expert"], "moe_router_topk": 2}
        found[f"ep={num_ranks}/two-hop/k=1"] = {"num_moe_experts": num_ranks}, one
        found[f"ep={num_ranks}/two-hop/shared-expert/k=1"] = shared, one
        found[f"ep={num_ranks}/two-hop/top-4/k=2"] = many, two
    return found


def run(num_ranks: int) -> dict[str, Any]:
    from megatron.core import parallel_state

    from megatron_lancet.training.megatron.mock_patches import loopback_counts

    with mock_world(num_ranks, SLOW_ENOUGH), loopback_counts():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
        own = {"expert_model_parallel_size": num_ranks}
        try:
            found = {
                name: compare_plan(own | overrides, plan, nodes=NODES.get(num_ranks) if "two-hop" in name else None)
                for name, (overrides, plan) in plan_cases(num_ranks).items()
            }
            if num_ranks in WORLDS:
                for name, (overrides, num_chunks) in cases(num_ranks).items():
                    found[name] = compare(own | overrides, num_chunks)
                found |= controls(num_ranks)
            return found
        finally:
            parallel_state.destroy_model_parallel()


def controls(num_ranks: int) -> dict[str, Any]:
    """What must be seen: chunks that balance themselves, and stock without the loopback's counts."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.transformer.moe import token_dispatcher

    overrides = {"expert_model_parallel_size": num_ranks, "num_moe_experts": WORLDS[num_ranks]}
    found: dict[str, Any] = {f"ep={num_ranks}/naive-aux-loss": compare(overrides, 2, naive_aux_loss)}
    with ExitStack() as stack:
        name = "gather_from_sequence_parallel_region"
        stack.enter_context(replaced(token_dispatcher, name, gather_from_sequence_parallel_region))
        try:
            run_stock(overrides)
        except ValueError as error:
            found[f"ep={num_ranks}/stock-counts"] = str(error)
    logged_losses()  # of the step that failed
    return found


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / NUM_MICRO_BATCHES)
    return {name: found for num_ranks in SIZES for name, found in run(num_ranks).items()}


results = launch.result(all_results, timeout_s=400, joins=False)


@pytest.mark.parametrize(
    "case",
    [
        *(name for num_ranks in WORLDS for name in cases(num_ranks)),
        *(name for num_ranks in SIZES for name in plan_cases(num_ranks)),
    ],
)
def test_gradients_equal_stock(results, case, check_gradients):
    found = results[case]
    assert found["zero_gradients"] == []
    # As on real ranks: with one chunk the order of all sums is stock's.
    bound = 0.0 if case.endswith("/k=1") else TOLERANCE
    check_gradients.equal_stock([results], case, bound)
    assert found["expert_bias_counts_equal"]
    messages = {op.rsplit(".", 1)[1] for op in found["collectives"] if ".I." in op}
    hops = {"node_dispatch", "local_dispatch", "local_combine", "node_combine"}
    assert messages == (hops if "/two-hop/" in case else {"dispatch", "combine"})


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_gradient_comparison_detects_a_naive_aux_loss(results, num_ranks):
    found = results[f"ep={num_ranks}/naive-aux-loss"]
    assert found["gradients"]["decoder.layers.1.mlp.router.weight"] > 100 * TOLERANCE


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_stock_without_loopback_counts_is_refused(results, num_ranks):
    assert "receive splits must equal send splits" in results[f"ep={num_ranks}/stock-counts"]
