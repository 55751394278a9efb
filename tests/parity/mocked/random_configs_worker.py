"""Random models, routers, cuts and ranges against stock, as rank 0 of a mocked world of 8 ranks.

Usage: random_configs_worker.py RESULT.json NUM_EXAMPLES [SEED]. Without a seed the draws are the same each time.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st

from benchmarks.gradient_error import worst
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_world import mock_world
from tests.parity.gradients.gradients_worker import MICRO_BATCH, NUM_MICRO_BATCHES, build, compare, logged_losses
from tests.parity.gradients.variants import FULL, MLA
from tests.parity.te.variants import FUSED, TE
from tests.te_cpu import te_platform

NUM_RANKS, NUM_EXPERTS = 8, 16
# As for fixed configurations; small gradients of many experts that few tokens reach make the ratio a bit larger.
TOLERANCE = 5e-6
SMALL_LINK = Link(latency_us=50, gbytes_per_s=1)

ROUTERS: dict[str, list[dict[str, Any]]] = {
    "balancing": [
        {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0},
        *({"moe_router_load_balancing_type": f"{kind}aux_loss"} for kind in ("", "seq_", "global_")),
        {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [1e-2, 3e-2]},
        {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    ],
    "z-loss": [{"moe_z_loss_coeff": None}, {"moe_z_loss_coeff": 1e-2}],
    "score": [
        {},
        {"moe_router_pre_softmax": True},
        {"moe_router_score_function": "sigmoid"},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    ],
    "top-k": [{"moe_router_topk": topk} for topk in (1, 2, 3)],
    "scaling": [{}, {"moe_router_topk_scaling_factor": 2.5}],
    "groups": [{}, {"moe_router_num_groups": 4, "moe_router_group_topk": 2}],
    "dtype": [{}, {"moe_router_dtype": "fp32"}, {"moe_router_dtype": "fp64"}],
    "capacity": [
        {},
        {},
        *(
            {
                "moe_expert_capacity_factor": 1.0,
                "moe_token_drop_policy": policy,
                "moe_pad_expert_input_to_capacity": pad,
            }
            for policy in ("probs", "position")
            for pad in (False, True)
        ),
    ],
}
MODELS: dict[str, list[dict[str, Any]]] = {
    "layers": [{}, {}, TE, {**TE, **FUSED}, {**TE, **FUSED, "moe_grouped_gemm": False}],
    "attention": [{}, {"num_query_groups": 2}, MLA],
    "positions": [{}, {"position_embedding_type": "rope"}],
    "mlp": [{}, {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}, {"add_bias_linear": True}],
    "shared": [
        {},
        {"moe_shared_expert_intermediate_size": 48},
        {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True},
    ],
    "dense": [{}, {"moe_layer_freq": [0, 1, 1]}, {"moe_layer_freq": [1, 0, 1]}],
    "recompute": [
        {},
        FULL,
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe", "shared_experts", "mlp"]},
    ],
}
SETTINGS = {**ROUTERS, **MODELS}


def looks_at_whole_micro_batch(overrides: dict[str, Any]) -> bool:
    """Whether routing looks at the full micro-batch, so that the plan starts after the gate."""
    return "sinkhorn" in overrides["moe_router_load_balancing_type"] or "moe_expert_capacity_factor" in overrides


def fails_in_stock(overrides: dict[str, Any]) -> bool:
    """Whether stock can't train the configuration, though it accepts it."""
    if not overrides.get("add_bias_linear"):
        return False
    # Its checkpoint returns the bias itself, and from then on takes it for its own output.
    checkpoints_bias = "mlp" in overrides.get("recompute_modules", ())
    # Sequential experts add the bias in place, to what Transformer Engine has returned as a view.
    return checkpoints_bias or ("te" in overrides and not overrides["moe_grouped_gemm"])


def check(picks: dict[str, dict[str, Any]], cut: dict[str, Any], num_chunks: int) -> tuple[str, float] | None:
    """Compare one configuration; the parameter that deviates most, and by how much; None where Megatron refuses it."""
    overrides: dict[str, Any] = {"expert_model_parallel_size": NUM_RANKS, "num_moe_experts": NUM_EXPERTS}
    for pick in picks.values():
        overrides |= pick
    if fails_in_stock(overrides):
        return None
    if looks_at_whole_micro_batch(overrides):
        cut = {**cut, "over": "experts"}
    if cut["dim"] == "batch":
        num_chunks = min(num_chunks, MICRO_BATCH)
    try:
        build(overrides)
    except (AssertionError, ValueError):
        return None
    found = compare(overrides, num_chunks, **cut)
    what = f"{num_chunks} chunks, {cut}, {overrides}"
    parameter, error = worst(found["gradients"])
    assert error <= TOLERANCE, f"{parameter} is off by {error}: {what}"
    assert found["loss"] <= TOLERANCE, f"loss is off by {found['loss']}: {what}"
    assert found["logged"] <= TOLERANCE, f"logged losses are off by {found['logged']}: {what}"
    assert found["logged_names_equal"], what
    assert found["expert_bias_counts_equal"], what
    assert found["reports"] == dict.fromkeys(found["parameters"], 1), what
    return parameter, error


def main() -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    from megatron_lancet.training.megatron.mock_patches import loopback_counts

    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / NUM_MICRO_BATCHES)
    tried: Counter[str] = Counter()
    deviations: list[tuple[str, float]] = []

    def draw_and_check(picks: dict[str, dict[str, Any]], cut: dict[str, Any], num_chunks: int) -> None:
        deviation = check(picks, cut, num_chunks)
        if deviation is None:
            tried["refused by Megatron"] += 1
            reject()
        deviations.append(deviation)
        tried["compared"] += 1
        tried[f"{cut['dim']} chunks"] += 1
        tried["layers of Transformer Engine"] += "te" in picks["layers"]

    cuts = st.fixed_dictionaries(
        {
            "dim": st.sampled_from(["batch", "sequence"]),
            "over": st.sampled_from(["experts", "gate", "stack", "stack"]),
            "dw": st.sampled_from(["fill", "fill", "none"]),
        }
    )
    picks = st.fixed_dictionaries({name: st.sampled_from(choices) for name, choices in SETTINGS.items()})
    test = given(picks, cuts, st.integers(1, 8))(draw_and_check)
    test = settings(
        max_examples=int(sys.argv[2]),
        derandomize=len(sys.argv) == 3,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )(test)
    if len(sys.argv) > 3:
        test = seed(int(sys.argv[3]))(test)
    with mock_world(NUM_RANKS, SMALL_LINK), loopback_counts():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=NUM_RANKS)
        try:
            test()
        finally:
            parallel_state.destroy_model_parallel()
    logged_losses()
    Path(sys.argv[1]).write_text(json.dumps({"tried": tried, "worst": max(deviations, key=lambda entry: entry[1])}))


if __name__ == "__main__":
    with te_platform():
        main()
