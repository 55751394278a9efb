"""Layers and plans that are refused where sums are added one layer later."""

from collections.abc import Iterator, Sequence

from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.plan import Plan

PATTERN = "--moe-layer-freq ([1,0]*N) for 2N layers"


def layers_blocker(kinds: Sequence[LayerKind]) -> str | None:
    """Why the layers of a model, or of a pipeline stage, can't be wired in pairs; None if they can."""
    expected = [LayerKind.MOE, LayerKind.DENSE] * (len(kinds) // 2)
    if kinds and list(kinds) == expected:
        return None
    found = ", ".join(kinds[:8]) + (", …" if len(kinds) > 8 else "")
    return f"expected MoE and dense layers in turn, MoE first, found {found or 'no layers'}"


def plan_blocker(plan: Plan) -> str | None:
    """Why layers in pairs can't run a plan, as a clause; None if they can."""
    return next(_plan_blockers(plan), None)


def _plan_blockers(plan: Plan) -> Iterator[str]:
    for segment in (*plan.segments, *plan.at_ends.segments):
        if segment.tiles:
            yield "it sends rows in tiles, and no layer of its own waits for the last one"
        if segment.num_chunks > 1 and not segment.range.has_attention:
            yield f"its chunks are put together in front of the next layer (range={segment.range})"
        if segment.first_layer % 2 == 0:
            yield f"a segment begins at layer {segment.first_layer}, between a MoE layer and its dense layer"
