"""Models and plans of the comparison with Transformer Engine's layers, next to ``parity/gradients/variants.py``."""

from typing import Any

from megatron_lancet.schedule.plan import DwPolicy, Gap, LocalTokens, Plan, fixed_plan, paired
from tests.features.dedup.cases import dedup
from tests.features.placement.cases import placed
from tests.parity.gradients.gradients_worker import plan_of
from tests.parity.gradients.variants import (
    DW_MEMORY_CASES,
    FORCED,
    HYBRID,
    MLA,
    RECOMPUTE,
    SEGMENTED,
    SEQUENCE,
    VARIANTS,
    WHOLE_ROUTING,
    chunk_counts,
)
from tests.parity.paired.paired_cases import DROPOUT, K1_NONE, Case

TE: dict[str, Any] = {"te": True, "moe_grouped_gemm": True, "gradient_accumulation_fusion": False}
"""Overrides that select Transformer Engine's layers and its grouped experts."""
FUSED: dict[str, Any] = {"gradient_accumulation_fusion": True}
"""dW is added to the gradient by the GEMM, as ``--gradient-accumulation-fusion`` asks."""
PLACED = {
    "placed/grouped/k=1": placed({**TE, "gated_linear_unit": True}, fixed_plan(1)),
    "placed/sequential/k=1": placed({**TE, "moe_grouped_gemm": False}, fixed_plan(1)),
}
FP8: dict[str, Any] = {"bf16": True, "hidden_size": 64, "fp8": "hybrid", "fp8_recipe": "delayed"}
RMS_NORM = {"normalization": "RMSNorm"}

ROUTERS = (
    *("two-aux-losses", "sigmoid-expert-bias", "per-token-loss", "grouped-experts", "tied-embeddings", "frozen-layer"),
    *("frozen-tied-embeddings", *FORCED),
)
"""Variants that differ outside of Transformer Engine's modules, which are compared in chunks only."""
LOCAL_ONLY = (
    *("no-balancing", "seq-aux-loss", "global-aux-loss", "top-1", "group-limited", "fp32-router", "fp64-router"),
    "frozen-router-embedding-output",
)
"""Further ones: compared with local layers, and drawn in ``mocked/test_random_configs``."""


MODELS: dict[str, dict[str, Any]] = {
    "fused": FUSED,
    "fused-bias": {**FUSED, "moe_layer_freq": [0, 1, 1], "add_bias_linear": True},
    "sequential-experts": {**FUSED, "moe_grouped_gemm": False},
    "mla": MLA,
    "rms-norm-qk-layernorm": {**RMS_NORM, "qk_layernorm": True, "num_query_groups": 2},
    "zero-centered-norm": {**RMS_NORM, "layernorm_zero_centered_gamma": True},
    "hybrid-mla": {**MLA, **HYBRID, "hybrid_layer_pattern": "+E+-+E"},
    "sliding-window": {"window_size": (5, 0)},
    "attention-sink": {"softmax_type": "learnable"},
    "log-max-attention-logit": {"log_max_attention_logit": True},
}
"""With one chunk and with sequence chunks; those of :data:`IN_BATCHES` also with batch chunks."""

IN_BATCHES = ("fused", "fused-bias", "sequential-experts", "mla")

CUTS: list[tuple[str, dict[str, Any], int, dict[str, str]]] = [
    ("bf16", {"bf16": True}, 1, {}),
    ("hybrid-fp8", {**HYBRID, **FP8, "fp8_recipe": "tensorwise"}, 1, {}),
    ("bf16-fused", {**FUSED, "bf16": True}, 1, {}),
    ("fused", FUSED, 4, {"dw": "none"}),
    ("plain", {}, 2, {"dw": "none"}),
    *((name, settings, k, SEQUENCE) for name, settings in RECOMPUTE.items() for k in (1, 3)),
    *((name, VARIANTS[name], 3, SEQUENCE) for name in ("llama-like", "shared-expert-gate", "core-attention-recompute")),
    *(("mtp-2-fused", {**FUSED, **VARIANTS["mtp-2"]}, k, SEQUENCE) for k in (1, 3)),
    ("mtp-repeated-fp8/bf16", {**FP8, **VARIANTS["mtp-repeated"]}, 1, {}),
    ("mtp-2-full-recompute", {**RECOMPUTE["full-recompute"], **VARIANTS["mtp-2"]}, 3, {}),
    ("mla-yarn", {**MLA, "rope_type": "yarn"}, 3, SEQUENCE),
    *(("plain", {}, 3, {"over": over}) for over in ("experts", "gate")),
]
"""Further axes: name, overrides, chunks, fields of the plan."""

HAZARDS: dict[str, tuple[dict[str, Any], Plan]] = {
    # The first chunk's dW comes last.
    "first-call": (FUSED, fixed_plan(3)),
    # No room: each dW runs as soon as it is put.
    "dw-at-once": ({}, fixed_plan(2, dw_memory_bytes=1)),
    "gaps": (
        FUSED,
        Plan(
            fixed_plan(2).segments,
            dw_window=4,
            gaps=(Gap("L2.c1.I.combine", ("L3.W.mlp.experts.linear_fc1", "L3.W.self_attention.linear_qkv")),),
        ),
    ),
}
"""Plans in which a module's own habits would give wrong gradients, see ``features/te/linear.py``; and planned gaps."""

GUARDED: dict[str, tuple[dict[str, Any], Plan]] = {
    "guarded/fused/k=2": (FUSED, fixed_plan(2)),
    "guarded/plain/k=1": ({}, fixed_plan(1)),
    "guarded/fp8/bf16/k=1": ({**FP8, "moe_layer_freq": [0, 1, 1]}, fixed_plan(1)),
}
MOST_ROWS = 40
"""That a rank's experts work on at a time in :data:`GUARDED`."""

TILED: dict[str, tuple[dict[str, Any], Plan]] = {
    "fused/tiles-2-half": (FUSED, fixed_plan(1, tiles=2)),
    "fused/tiles-4-after/dedup": (FUSED, dedup(fixed_plan(2, tiles=4, local_tokens=LocalTokens.AFTER))),
    "fused/tiles-2-tiled": (FUSED, fixed_plan(1, tiles=2, local_tokens=LocalTokens.TILED)),
    "plain/tiles-2-half/at-once": ({}, fixed_plan(1, DwPolicy.NONE, tiles=2)),
    "fused-bias/tiles-1-half": (MODELS["fused-bias"], fixed_plan(1, tiles=1)),
    "sequential-experts/tiles-2-after": (
        MODELS["sequential-experts"],
        fixed_plan(1, tiles=2, local_tokens=LocalTokens.AFTER),
    ),
}
"""Rows that go to other ranks in tiles. Parts of few rows are not padded here, so that sums have other orders."""

PAIRED: dict[str, Case] = {
    name: case._replace(overrides={**TE, **FUSED, **case.overrides})
    for name, case in {
        "paired/plain": Case({"gradient_accumulation_fusion": False}),
        "paired/fused": Case({}),
        "paired/fused/none": Case({}, K1_NONE, 3, True),
        "paired/fused/chunks-at-ends": Case({}, paired(fixed_plan(1), fixed_plan(2)), 3, True),
        "paired/sequential-experts": Case({"moe_grouped_gemm": False}),
        "paired/selective-recompute/dropout": Case({**RECOMPUTE["selective-recompute"], **DROPOUT}),
        "paired/full-recompute/dropout": Case({**RECOMPUTE["full-recompute"], **DROPOUT}),
    }.items()
}
"""Cases with pairing: Transformer Engine's modules keep a micro-batch's state while another one runs."""


def case_name(name: str, num_chunks: int, cut: dict[str, str] | None = None) -> str:
    return "/".join([name, f"k={num_chunks}", *(cut or {}).values()])


def cases() -> dict[str, tuple[dict[str, Any], Plan]]:
    """All that is compared: overrides in addition to :data:`TE`, and the plan, by name."""
    cuts: list[tuple[str, dict[str, Any], int, dict[str, str]]] = [*CUTS]
    cuts += [(name, settings, k, {}) for name, settings in {**VARIANTS, **FORCED}.items() for k in _chunk_counts(name)]
    for name, settings in MODELS.items():
        cuts += [(name, settings, 1, {}), (name, settings, 3, SEQUENCE)]
    cuts += [(name, MODELS[name], 2, {}) for name in IN_BATCHES]
    found = {case_name(name, k, cut): (settings, plan_of(k, **cut)) for name, settings, k, cut in cuts}
    for name in ("capacity-padded", "jitter"):
        found[case_name(name, 3)] = WHOLE_ROUTING[name], plan_of(3, over="experts")
    for name in ("segments/batch-then-sequence", "segments/dense-between"):
        found[name] = SEGMENTED[name]
    for name in ("dw-memory-1/k=2", "dw-memory-20000/k=2"):
        memory_bytes, num_chunks = DW_MEMORY_CASES[name]
        found[name] = FUSED, fixed_plan(num_chunks, dw_memory_bytes=memory_bytes)
    for num_chunks in (1, 2):
        found[f"fused/k={num_chunks}/dedup"] = FUSED, dedup(fixed_plan(num_chunks))
    return found | HAZARDS | TILED


def _chunk_counts(variant: str) -> tuple[int, ...]:
    if variant in LOCAL_ONLY:
        return ()
    return (3,) if variant in ROUTERS else chunk_counts(variant)


FURTHER = frozenset(
    f"{name}/{cut}"
    for cut, names in {
        # Routers are not Transformer Engine's; local layers' are compared in all ways.
        "k=3": "two-aux-losses sigmoid-expert-bias per-token-loss core-attention-recompute mtp-1 mtp-2 llama-like "
        "hybrid-shared-expert shared-expert shared-expert-gate frozen-layer bias dense-first-layer grouped-experts",
        "k=4": "plain",
        "k=2": "mla",
        "k=1": "shared-expert zero-centered-norm sliding-window log-max-attention-logit",
        "k=3/sequence": "block-recompute",
        "k=3/experts": "plain",
    }.items()
    for name in names.split()
)
"""Cases that only run at night: others have each of their parts, with local layers or with another cut."""
