"""Models, cuts and settings that are compared with stock Megatron."""

from typing import Any

import torch

from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Gap, OverlapRange, Plan, Segment, fixed_plan

DW_MEMORY_CASES = {"dw-memory-1/k=2": (1, 2), "dw-memory-20000/k=1": (20_000, 1), "dw-memory-20000/k=2": (20_000, 2)}
"""Bytes and chunks. One byte is too small for any dW; 20,000 are less than the peak without a bound."""

_SIGMOID_BIAS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}
MTP: dict[str, dict[str, Any]] = {
    "mtp-1": {"mtp_num_layers": 1},
    "mtp-2": {"mtp_num_layers": 2, "moe_shared_expert_intermediate_size": None, "position_embedding_type": "rope"},
    "mtp-repeated": {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
    "mtp-detached-heads": {"mtp_num_layers": 2, "mtp_detach_heads": True},
}
HYBRID = {"hybrid_layer_pattern": "*E*-*E", "num_layers": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-balancing": {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None},
    "seq-aux-loss": {"moe_router_load_balancing_type": "seq_aux_loss"},
    "global-aux-loss": {"moe_router_load_balancing_type": "global_aux_loss"},
    "two-aux-losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [1e-2, 3e-2],
    },
    "top-1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "sigmoid-expert-bias": _SIGMOID_BIAS,
    "group-limited": {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk": 2},
    "fp32-router": {"moe_router_dtype": "fp32"},
    "fp64-router": {"moe_router_dtype": "fp64"},
    "shared-expert": {"moe_shared_expert_intermediate_size": 48},
    "shared-expert-gate": {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True},
    "dense-first-layer": {"moe_layer_freq": [0, 1, 1]},
    "one-expert-per-rank": {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "bias": {"add_bias_linear": True},
    "llama-like": {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "num_query_groups": 2,
        "position_embedding_type": "rope",
    },
    "per-token-loss": {"calculate_per_token_loss": True},
    "core-attention-recompute": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "tied-embeddings": {"share_embeddings": True},
    "grouped-experts": {"num_moe_experts": 8},
    "grouped-experts-gated": {"num_moe_experts": 16, "moe_router_topk": 4, "gated_linear_unit": True},
    **MTP,
    "hybrid": HYBRID,
    "hybrid-shared-expert": {**HYBRID, "moe_shared_expert_intermediate_size": 48},
    "frozen-half-of-the-linears": {"frozen": r"linear_(qkv|fc1)|local_experts\.0"},
    "frozen-layer": {"frozen": r"layers\.1\."},
    "frozen-router-embedding-output": {"frozen": r"router|embedding|output_layer"},
    "frozen-tied-embeddings": {"share_embeddings": True, "frozen": r"embedding"},
}
"""Overrides of the transformer config; some are of the model (see ``build``)."""

CHUNK_COUNTS = {
    "plain": (1, 2, 4),
    "fp64-router": (1,),
    "mtp-detached-heads": (1,),
    **dict.fromkeys(("top-1", "grouped-experts-gated", "frozen-layer", "frozen-tied-embeddings"), (3,)),
}
"""Where they are not 1 and 3: with one chunk the last ones differ from a neighbour in little."""


def chunk_counts(variant: str) -> tuple[int, ...]:
    """In which a variant is compared."""
    return CHUNK_COUNTS.get(variant, (1, 3))


FORCED: dict[str, dict[str, Any]] = {
    "idle-expert": {**_SIGMOID_BIAS, "expert_bias": [0.0, 0.0, -9.0, 0.0]},
    "idle-rank": {**_SIGMOID_BIAS, "expert_bias": [9.0, 9.0, 0.0, 0.0]},
    "all-to-one-expert": {**_SIGMOID_BIAS, "moe_router_topk": 1, "expert_bias": [0.0, 0.0, 0.0, 9.0]},
}
"""Routing that leaves experts without a token: a bias decides, gradients of the scores remain. Two experts a rank."""

SEQUENCE = {"dim": "sequence"}
CAPACITY = {"moe_expert_capacity_factor": 0.75}
MLA = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 12,
}
WHOLE_ROUTING: dict[str, dict[str, Any]] = {
    "capacity-probs": CAPACITY,
    "capacity-position": {**CAPACITY, "moe_token_drop_policy": "position"},
    "capacity-padded": {**CAPACITY, "moe_pad_expert_input_to_capacity": True},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0, "moe_router_topk": 1},
    "jitter": {"moe_input_jitter_eps": 0.1},
}
"""Routers that look at the full micro-batch, or draw random numbers once for it."""

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "full-recompute": {**FULL, "moe_layer_freq": [0, 1, 1], "moe_shared_expert_intermediate_size": 48},
    "block-recompute": {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
    "selective-recompute": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp", "moe", "shared_experts"],
        "moe_layer_freq": [0, 1, 1],
        "moe_shared_expert_intermediate_size": 48,
    },
}

_PADDED = {**VARIANTS["two-aux-losses"], "padded": True}
PADDED: list[tuple[str, dict[str, Any], int, dict[str, str]]] = [
    *(("padding", _PADDED, k, {}) for k in (1, 3)),
    ("padding-global", {**VARIANTS["global-aux-loss"], "padded": True}, 3, SEQUENCE),
    ("padding-per-token", {**_PADDED, "calculate_per_token_loss": True}, 3, SEQUENCE),
    ("padding-mtp-recompute", {**VARIANTS["mtp-2"], **FULL, "padded": True}, 3, {}),
    ("padding-hybrid", {**HYBRID, **_PADDED}, 3, {"over": "gate"}),
    ("padding-capacity", {**CAPACITY, **_PADDED}, 3, {"over": "experts"}),
]
"""Routers that skip padding tokens, in addition to :data:`CUTS`."""
_PAIR = {"position_embedding_type": "rope", "rotary_pair": True}
ROTARY_PAIRS: list[tuple[str, dict[str, Any], int, dict[str, str]]] = [
    ("rotary-pair-mtp", {**_PAIR, **MTP["mtp-1"]}, 3, {}),
    ("rotary-pair-recompute", {**_PAIR, **FULL}, 3, SEQUENCE),
]
"""Queries and keys with separate rotary embeddings."""

SEQUENCE_MATTERS = (
    "two-aux-losses",
    "shared-expert-gate",
    "bias",
    "llama-like",
    "per-token-loss",
    "tied-embeddings",
    "hybrid",
)
"""Variants with a part that sees positions or the number of tokens; the others are drawn in test_random_configs."""

CUTS: list[tuple[str, dict[str, Any], int, dict[str, str]]] = [
    *(("plain", {}, k, SEQUENCE) for k in (3, 8)),
    *((name, VARIANTS[name], 3, SEQUENCE) for name in SEQUENCE_MATTERS),
    *((name, settings, 1, {}) for name, settings in RECOMPUTE.items()),
    *(("mtp-2-full-recompute", {**VARIANTS["mtp-2"], **FULL}, k, {}) for k in (1, 3)),
    ("mtp-repeated", VARIANTS["mtp-repeated"], 3, SEQUENCE),
    ("dropout", {"hidden_dropout": 0.1, "attention_dropout": 0.1}, 1, {}),
    *((name, RECOMPUTE[name], 3, {}) for name in ("full-recompute", "selective-recompute")),
    *((name, RECOMPUTE[name], 3, SEQUENCE) for name in ("block-recompute", "selective-recompute")),
    ("full-recompute", RECOMPUTE["full-recompute"], 2, {"over": "experts"}),
    ("mla", MLA, 1, {}),
    ("mla", MLA, 3, SEQUENCE),
    ("mla-yarn", {**MLA, "rope_type": "yarn"}, 3, SEQUENCE),
    *(("plain", {}, k, {"over": over}) for over in ("experts", "gate") for k in (1, 3)),
    *(("hybrid", HYBRID, 3, {"over": over}) for over in ("experts", "gate")),
    ("hybrid-full-recompute", {**HYBRID, **FULL}, 3, {}),
    *(("dense-first-layer", VARIANTS["dense-first-layer"], 2, {"over": o, **SEQUENCE}) for o in ("gate", "stack")),
    *((name, settings, k, {"over": "experts"}) for name, settings in WHOLE_ROUTING.items() for k in (1, 3)),
    ("capacity-probs", CAPACITY, 3, {"over": "experts", **SEQUENCE}),
    *PADDED,
    *ROTARY_PAIRS,
]
"""Further axes and ranges: name, overrides, chunks, fields of the plan."""


_LAST_QKV, _LAST_PROJ = (f"L3.W.self_attention.linear_{name}" for name in ("qkv", "proj"))
_LAST_FC1 = "L3.W.mlp.experts.local_experts.1.linear_fc1"
GAPS = (
    Gap("L3.c1.I.dispatch", ("W.output_layer",)),
    Gap("L2.c1.I.combine", (_LAST_QKV, "W.no_such_layer", _LAST_FC1, _LAST_QKV)),
    Gap("L2.c0.I.dispatch", ("L2.W.mlp.experts.local_experts.0.linear_fc2", _LAST_PROJ)),
)
WITH_GAPS: dict[str, Plan] = {
    "gaps/k=1": Plan(fixed_plan(1).segments, dw_window=4, gaps=GAPS[2:]),
    "gaps/k=2": Plan(fixed_plan(2).segments, dw_window=4, gaps=GAPS),
}
SEGMENTED: dict[str, tuple[dict[str, Any], Plan]] = {
    "segments/batch-then-sequence": (
        {},
        Plan((Segment(1, 1, 2), Segment(2, None, 3, ChunkDim.SEQUENCE)), dw_window=4),
    ),
    "segments/whole-then-gate": (
        {"num_moe_experts": 8},
        Plan((Segment(1, 1, 1), Segment(2, 3, 4, ChunkDim.BATCH, OverlapRange.GATE)), dw_window=8, gaps=GAPS),
    ),
    "segments/dense-first-layer": (
        VARIANTS["dense-first-layer"],
        Plan(
            (
                Segment(1, 2, 2, ChunkDim.SEQUENCE),
                Segment(3, None, 3, ChunkDim.BATCH, OverlapRange.EXPERTS),
            ),
            dw_window=6,
            dw_memory_bytes=20_000,
        ),
    ),
    "segments/dense-between": (
        {"moe_layer_freq": [1, 0, 1], "position_embedding_type": "rope"},
        Plan((Segment(1, 1, 3, ChunkDim.SEQUENCE), Segment(2, 2, 1), Segment(3, 3, 2)), DwPolicy.NONE),
    ),
    "segments/capacity": (
        CAPACITY,
        Plan(
            (
                Segment(1, 1, 2, ChunkDim.SEQUENCE, OverlapRange.EXPERTS),
                Segment(2, None, 3, ChunkDim.BATCH, OverlapRange.EXPERTS),
            ),
            dw_window=4,
        ),
    ),
    "segments/mtp-repeated": (
        VARIANTS["mtp-repeated"],
        Plan((Segment(1, 4, 2), Segment(5, None, 3, ChunkDim.SEQUENCE, OverlapRange.GATE)), dw_window=4),
    ),
    "segments/padding": (
        {**VARIANTS["mtp-repeated"], "padded": True},
        Plan((Segment(1, 4, 2), Segment(5, None, 3, ChunkDim.SEQUENCE, OverlapRange.GATE)), dw_window=4),
    ),
    "segments/all-whole/k=1": ({}, Plan((Segment(1, 2, 1), Segment(3, 3, 1)), dw_window=2)),
}
"""Plans whose layers run in different ways: name, overrides, plan."""


MICRO_BATCH_OF_ONE: dict[str, tuple[int, dict[str, str]]] = {
    "micro-batch-of-1/k=1": (1, {}),
    "micro-batch-of-1/k=3": (3, SEQUENCE),
}
"""Chunks and fields of the plan where a micro-batch has one sample."""


def cut_name(name: str, num_chunks: int, cut: dict[str, str]) -> str:
    return "/".join([name, f"k={num_chunks}", *cut.values()])


FURTHER = frozenset(
    f"{name}/{cut}"
    for cut, names in {
        # Routers with one chunk are compared in ``mocked/test_gradients_in_mocked_worlds``, others with TE's layers.
        "k=1": "seq-aux-loss global-aux-loss sigmoid-expert-bias shared-expert no-balancing fp32-router "
        "grouped-experts tied-embeddings per-token-loss core-attention-recompute dense-first-layer bias llama-like "
        "hybrid-shared-expert one-expert-per-rank frozen-router-embedding-output mtp-1 idle-expert block-recompute "
        "selective-recompute mtp-2-full-recompute",
        "k=3": "mtp-1 hybrid-shared-expert idle-expert idle-rank all-to-one-expert mtp-2-full-recompute "
        "selective-recompute",
        "k=3/sequence": "per-token-loss llama-like mla-yarn mtp-repeated",
        "k=1/experts": "capacity-position sinkhorn",
        "k=1/gate": "plain",
        "k=3/gate": "hybrid",
    }.items()
    for name in names.split()
)
"""Rows that only run at night: others have each of their parts, with as many chunks."""
