"""Plans with the deduplicated dispatch that are compared with stock Megatron."""

from dataclasses import replace
from typing import Any, NamedTuple

from megatron_lancet.schedule.plan import ChunkDim, Dispatch, OverlapRange, Plan, fixed_plan
from tests.parity.gradients.variants import CAPACITY, FORCED, HYBRID, MLA, RECOMPUTE, SEGMENTED, VARIANTS


class DedupCase(NamedTuple):
    """A model and its plan.

    Attributes:
        overrides: of the config, see ``gradients_worker.build``.
        plan: with the deduplicated dispatch.
        disturbed: whether transfers seem done, or not, at random and differently on each rank.
    """

    overrides: dict[str, Any]
    plan: Plan
    disturbed: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the results must be stock's to the bit: sums of two summands have one order."""
        return self.plan.num_chunks == 1 and self.overrides.get("moe_router_topk", 2) <= 2


def dedup(plan: Plan) -> Plan:
    """The plan with the deduplicated dispatch."""
    return replace(plan, dispatch=Dispatch.DEDUP)


ONE, TWO, THREE = (dedup(fixed_plan(count)) for count in (1, 2, 3))
_SEQUENCE = dedup(fixed_plan(3, chunk_dim=ChunkDim.SEQUENCE))
_WHOLE_EXPERTS = dedup(fixed_plan(1, overlap_range=OverlapRange.EXPERTS))
_EXPERTS_OF_SEQUENCE = dedup(fixed_plan(8, chunk_dim=ChunkDim.SEQUENCE, overlap_range=OverlapRange.EXPERTS))
_ONE_ROW_PER_EXPERT = {"moe_expert_capacity_factor": 0.01}
"""Four of a micro-batch's tokens are left, so of more than four chunks one sends no row to anyone."""
_TOP_4 = VARIANTS["grouped-experts-gated"]
_SEGMENTS, _SEGMENTS_PLAN = SEGMENTED["segments/whole-then-gate"]

CASES: dict[str, DedupCase] = {
    f"{name}/dedup": case
    for name, case in {
        "plain/k=1": DedupCase({}, ONE),
        "plain/k=2": DedupCase({}, TWO, disturbed=True),
        "grouped-experts-gated/k=1": DedupCase(_TOP_4, ONE),
        "grouped-experts-gated/k=3": DedupCase(_TOP_4, THREE),
        "group-limited/k=1": DedupCase(VARIANTS["group-limited"], ONE),
        "shared-expert/k=1": DedupCase(VARIANTS["shared-expert"], ONE),
        "sigmoid-expert-bias/k=3": DedupCase(VARIANTS["sigmoid-expert-bias"], THREE),
        "per-token-loss/k=1": DedupCase(VARIANTS["per-token-loss"], ONE),
        "fp64-router/k=1": DedupCase(VARIANTS["fp64-router"], ONE),
        "bf16/k=1": DedupCase({"bf16": True}, ONE),
        "capacity-probs/k=1/experts": DedupCase(CAPACITY, _WHOLE_EXPERTS),
        "capacity-of-one/k=8/experts/sequence": DedupCase(_ONE_ROW_PER_EXPERT, _EXPERTS_OF_SEQUENCE),
        "full-recompute/k=1": DedupCase(RECOMPUTE["full-recompute"], ONE),
        "selective-recompute/k=3/sequence": DedupCase(RECOMPUTE["selective-recompute"], _SEQUENCE),
        "mtp-repeated/k=1": DedupCase(VARIANTS["mtp-repeated"], ONE),
        "hybrid/k=3": DedupCase(HYBRID, THREE),
        "mla/k=1": DedupCase(MLA, ONE),
        "frozen-half-of-the-linears/k=1": DedupCase(VARIANTS["frozen-half-of-the-linears"], ONE),
        "idle-rank/k=3": DedupCase(FORCED["idle-rank"], THREE),
        "segments/whole-then-gate": DedupCase(_SEGMENTS, dedup(_SEGMENTS_PLAN)),
    }.items()
}
"""On two ranks with EP=2; two experts a rank unless the model has more."""
