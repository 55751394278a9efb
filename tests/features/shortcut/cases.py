"""Models and plans in which routed sums are added one layer later."""

from typing import Any

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Plan, fixed_plan, paired
from tests.features.case import Case
from tests.parity.gradients.variants import FULL, MLA, RECOMPUTE

MODEL: dict[str, Any] = {
    "num_layers": 4,
    "moe_layer_freq": [1, 0, 1, 0],
    "moe_shared_expert_intermediate_size": 48,
}
ONE, TWO = fixed_plan(1), fixed_plan(2)
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_DEDUP = {"num_moe_experts": 8, "moe_router_topk": 4}


def _case(overrides: dict[str, Any], plan: Plan, layout: str | None = None, **fields: Any) -> Case:
    return Case({**overrides, **MODEL}, plan, layout, **fields)


IDENTITY = "num_identity_experts"
"""Setting of a model that Megatron's config does not have."""
CASES: dict[str, Case] = {
    "plain/k=1": _case({}, ONE),
    "erratic-wire/k=1": _case({}, ONE, disturbed=True),
    "dw-none/k=1": _case({}, fixed_plan(1, DwPolicy.NONE)),
    "dw-memory/k=1": _case({}, fixed_plan(1, dw_memory_bytes=20_000)),
    "dropout/k=1": _case(DROPOUT, ONE),
    "bf16/k=1": _case({"bf16": True}, ONE),
    "full-recompute/k=1": _case(FULL, ONE),
    "selective-recompute/k=1": _case(RECOMPUTE["selective-recompute"], ONE),
    "mla/k=1": _case(MLA, ONE),
    "tied-embedding/k=1": _case({"share_embeddings": True}, ONE),
    "distributed-optimizer/k=1": _case({"distributed_optimizer": True}, ONE),
    "identity-experts/k=1": _case({IDENTITY: 3}, ONE),
    "identity-experts/erratic-wire/pairs/k=1": _case({IDENTITY: 3}, paired(ONE), disturbed=True),
    "identity-experts/full-recompute/k=1": _case({IDENTITY: 3, **FULL}, ONE),
    "identity-experts/bf16/k=1": _case({IDENTITY: 3, "bf16": True}, ONE),
    "identity-experts/dedup/k=1": _case({IDENTITY: 3}, fixed_plan(1, dispatch=DEDUP)),
    "identity-experts/k=2": _case({IDENTITY: 3}, TWO),
    "pairs/k=1": _case({}, paired(ONE)),
    "pairs/erratic-wire/k=1": _case({}, paired(ONE), disturbed=True),
    "pairs/full-recompute/k=1": _case(FULL, paired(ONE)),
    "dedup/k=1": _case({}, fixed_plan(1, dispatch=DEDUP)),
    "dedup/top-4/k=1": _case(_DEDUP, fixed_plan(1, dispatch=DEDUP), changes_sums=True),
    "placed/k=1": _case({}, ONE, moves_weights=True),
    "guarded/k=1": _case({}, ONE, max_rows=40, changes_sums=True),
    "guarded/pairs/k=1": _case({}, paired(ONE), max_rows=40, changes_sums=True),
    "erratic-wire/k=2": _case({}, TWO, disturbed=True),
    "full-recompute/k=2": _case(FULL, TWO),
    "sequence/k=3": _case({}, fixed_plan(3, chunk_dim=ChunkDim.SEQUENCE)),
    "pairs/chunks-at-the-ends/k=2": _case({}, paired(ONE, TWO)),
}
IN_LAYOUTS: dict[str, Case] = {
    "EP2xTP2/k=1": _case({}, ONE, "EP2xTP2"),
    "EP2xTP2/dropout/erratic-wire/k=1": _case(DROPOUT, ONE, "EP2xTP2", disturbed=True),
    "EP2xTP2/pairs/k=1": _case({}, paired(ONE), "EP2xTP2"),
    "EP2xTP2/erratic-wire/k=2": _case({}, TWO, "EP2xTP2", disturbed=True),
    "EP2xTP2/identity-experts/k=1": _case({IDENTITY: 3}, ONE, "EP2xTP2"),
    "EP2xETP2/k=1": _case({}, ONE, "EP2xETP2"),
    "EP2xCP2/k=1": _case({}, ONE, "EP2xCP2"),
    "EP4/dedup/k=1": _case({"num_moe_experts": 8}, fixed_plan(1, dispatch=DEDUP), "EP4", disturbed=True),
    "EP2xDP2/distributed-optimizer/k=1": _case({"distributed_optimizer": True}, ONE, "EP2xDP2", disturbed=True),
}
