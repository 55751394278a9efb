"""Models and plans with the deduplicated dispatch."""

from dataclasses import replace

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.schedule.plan import ChunkDim, OverlapRange, Plan, fixed_plan
from tests.features.case import Case
from tests.parity.gradients.variants import CAPACITY, FORCED, HYBRID, MLA, RECOMPUTE, SEGMENTED, VARIANTS


def dedup(plan: Plan) -> Plan:
    """The plan with the deduplicated dispatch."""
    return replace(plan, dispatch=DEDUP)


ONE, TWO, THREE = (dedup(fixed_plan(count)) for count in (1, 2, 3))
_SEQUENCE = dedup(fixed_plan(3, chunk_dim=ChunkDim.SEQUENCE))
_WHOLE_EXPERTS = dedup(fixed_plan(1, overlap_range=OverlapRange.EXPERTS))
_EXPERTS_OF_SEQUENCE = dedup(fixed_plan(8, chunk_dim=ChunkDim.SEQUENCE, overlap_range=OverlapRange.EXPERTS))
_ONE_ROW_PER_EXPERT = {"moe_expert_capacity_factor": 0.01}
"""Four of a micro-batch's tokens are left, so of more than four chunks one sends no row to anyone."""
_TOP_4 = VARIANTS["grouped-experts-gated"]
_SEGMENTS, _SEGMENTS_PLAN = SEGMENTED["segments/whole-then-gate"]

CASES: dict[str, Case] = {
    f"{name}/dedup": case
    for name, case in {
        "plain/k=1": Case({}, ONE),
        "plain/k=2": Case({}, TWO, disturbed=True),
        # Sums of two summands have one order, sums of four have several.
        "grouped-experts-gated/k=1": Case(_TOP_4, ONE, changes_sums=True),
        "grouped-experts-gated/k=3": Case(_TOP_4, THREE),
        "group-limited/k=1": Case(VARIANTS["group-limited"], ONE),
        "fp64-router/k=1": Case(VARIANTS["fp64-router"], ONE),
        "bf16/k=1": Case({"bf16": True}, ONE),
        "capacity-probs/k=1/experts": Case(CAPACITY, _WHOLE_EXPERTS),
        "capacity-of-one/k=8/experts/sequence": Case(_ONE_ROW_PER_EXPERT, _EXPERTS_OF_SEQUENCE),
        "full-recompute/k=1": Case(RECOMPUTE["full-recompute"], ONE),
        "selective-recompute/k=3/sequence": Case(RECOMPUTE["selective-recompute"], _SEQUENCE),
        "mtp-repeated/k=1": Case(VARIANTS["mtp-repeated"], ONE),
        "hybrid/k=3": Case(HYBRID, THREE),
        "mla/k=1": Case(MLA, ONE),
        "frozen-half-of-the-linears/k=1": Case(VARIANTS["frozen-half-of-the-linears"], ONE),
        "idle-rank/k=3": Case(FORCED["idle-rank"], THREE),
        "segments/whole-then-gate": Case(_SEGMENTS, dedup(_SEGMENTS_PLAN)),
    }.items()
}
"""On two ranks with EP=2; two experts a rank unless the model has more."""
IN_LAYOUTS: dict[str, Case] = {
    "EP4/dedup/k=1": Case({"num_moe_experts": 8}, ONE, "EP4"),
    "EP4/dedup/top-4/k=1": Case(
        {"num_moe_experts": 16, "moe_router_topk": 4}, ONE, "EP4", disturbed=True, changes_sums=True
    ),
    "EP2xTP2/dedup/k=1": Case({}, ONE, "EP2xTP2"),
    # The parts of an expert are on two ranks.
    "EP2xETP2/dedup/k=1": Case({}, ONE, "EP2xETP2", changes_sums=True),
    "EP2xCP2/dedup/k=1": Case({}, ONE, "EP2xCP2"),
}
SWITCHED: dict[str, Plan] = {"whole": fixed_plan(1), "whole-dedup": ONE, "batch-dedup": TWO}
"""Plans of one model, one after the other."""
