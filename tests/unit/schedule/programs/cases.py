"""The plans whose programs are frozen."""

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.schedule.plan import (
    ChunkDim,
    DwPolicy,
    LocalTokens,
    OverlapRange,
    Plan,
    Segment,
    fixed_plan,
    paired,
)
from tests.unit.schedule.programs.frozen import Case

BATCH, SEQUENCE = ChunkDim.BATCH, ChunkDim.SEQUENCE
EXPERTS, GATE, STACK = OverlapRange.EXPERTS, OverlapRange.GATE, OverlapRange.STACK


def fixed(num_chunks: int, over: OverlapRange = STACK, dim: ChunkDim = BATCH, **more) -> Plan:
    return fixed_plan(num_chunks, DwPolicy.FILL, dim, over, **more)


def segments(*parts: Segment, **more) -> Plan:
    return Plan(parts, dw_window=4, **more)


CHUNKS = {
    "k1": Case(fixed(1), "mm"),
    "k1-dense-first-shared-experts": Case(fixed(1), "dm", has_shared_experts=True),
    "k1-padded": Case(fixed(1), pads_to_capacity=True),
    "k2-dense": Case(fixed(2), "dd"),
    "k2-batch-stack-dense-first-shared-experts": Case(fixed(2), has_shared_experts=True),
    "k2-sequence-stack": Case(fixed(2, STACK, SEQUENCE), "mm"),
    "k2-dense-between": Case(fixed(2), "mdm"),
    "k2-batch-gate-shared-experts": Case(fixed(2, GATE), has_shared_experts=True),
    "k2-sequence-experts": Case(fixed(2, EXPERTS, SEQUENCE)),
    "k2-padded-experts": Case(fixed(2, EXPERTS), pads_to_capacity=True),
    "k3-sequence-stack": Case(fixed(3, STACK, SEQUENCE), "m"),
    "k3-sequence-gate": Case(fixed(3, GATE, SEQUENCE)),
    "k3-batch-experts-shared-experts": Case(fixed(3, EXPERTS), has_shared_experts=True),
    "k4-batch-stack": Case(fixed(4), "m"),
    "k4-batch-gate": Case(fixed(4, GATE), "m"),
    "k4-sequence-experts": Case(fixed(4, EXPERTS, SEQUENCE), "m"),
}
DISPATCHES = {
    "dedup-k1": Case(fixed(1, dispatch=DEDUP)),
    "dedup-k2-stack": Case(fixed(2, dispatch=DEDUP), has_shared_experts=True),
    "dedup-k2-sequence-experts": Case(fixed(2, EXPERTS, SEQUENCE, dispatch=DEDUP)),
    "two-hop-k1": Case(fixed(1, dispatch=TWO_HOP)),
    "two-hop-k2-stack-shared-experts": Case(fixed(2, dispatch=TWO_HOP), has_shared_experts=True),
    "two-hop-k2-gate": Case(fixed(2, GATE, SEQUENCE, dispatch=TWO_HOP)),
    "two-hop-k3-experts": Case(fixed(3, EXPERTS, dispatch=TWO_HOP), "m"),
}
TILES = {
    "tiles-2-k1": Case(fixed(1, tiles=2)),
    "tiles-2-k1-local-tokens-tiled": Case(fixed(1, tiles=2, local_tokens=LocalTokens.TILED)),
    "tiles-2-k1-local-tokens-after": Case(fixed(1, tiles=2, local_tokens=LocalTokens.AFTER), has_shared_experts=True),
    "tiles-2-k2-stack": Case(fixed(2, tiles=2)),
    "tiles-2-k2-sequence-gate": Case(fixed(2, GATE, SEQUENCE, tiles=2)),
    "tiles-2-k2-experts": Case(fixed(2, EXPERTS, tiles=2), has_shared_experts=True),
    "tiles-4-k1-dedup": Case(fixed(1, tiles=4, dispatch=DEDUP)),
    "tiles-4-k2-stack": Case(fixed(2, tiles=4), "m"),
}
SEGMENTS = {
    "segments-whole-then-gate": Case(segments(Segment(1, 1, 1), Segment(2, None, 2, BATCH, GATE)), "mm"),
    "segments-batch-then-sequence": Case(segments(Segment(1, 1, 2), Segment(2, None, 3, SEQUENCE)), "mm"),
    "segments-experts-then-whole-then-stack": Case(
        segments(Segment(1, 1, 2, BATCH, EXPERTS), Segment(2, 2, 1), Segment(3, None, 2)), "mdm"
    ),
    "segments-tiles-then-chunks": Case(segments(Segment(1, 1, 1, tiles=2), Segment(2, None, 2)), "mm"),
}
LAYERS = {
    "mtp-k1": Case(fixed(1), "mm", num_mtp=1),
    "mtp-k2-stack": Case(fixed(2), "dmd", num_mtp=2),
    "mtp-k2-gate": Case(fixed(2, GATE), num_mtp=1),
    "mtp-segments": Case(segments(Segment(1, 1, 2), Segment(2, None, 3, SEQUENCE, EXPERTS)), num_mtp=1),
    "hybrid-k1": Case(fixed(1), "*E-"),
    "hybrid-k2-stack": Case(fixed(2), "*E-", has_shared_experts=True),
    "hybrid-k2-gate": Case(fixed(2, GATE), "-*E"),
    "hybrid-k2-experts": Case(fixed(2, EXPERTS, SEQUENCE), "E*"),
}
STAGES = {
    "pipeline-k2-stack": Case(segments(Segment(1, 1, 2), Segment(2, None, 2)), "dm", (0, 1)),
    "interleaved-k1": Case(segments(*(Segment(one, one, 1) for one in range(1, 5))), "dmmm", (0, 1, 0, 1)),
}
ONE = fixed(1)
PAIRED = {
    "paired-k1": Case(paired(ONE)),
    "paired-k1-shared-experts-ends-k2": Case(paired(ONE, fixed(2)), "m", has_shared_experts=True),
    "paired-k2-sequence-ends-k1": Case(paired(fixed(2, STACK, SEQUENCE), ONE), "m"),
    "paired-tiles-2-ends-k2": Case(paired(fixed(1, tiles=2), fixed(2)), "m"),
    "paired-two-hop": Case(paired(fixed(1, dispatch=TWO_HOP)), "m"),
    "paired-dedup-experts": Case(paired(fixed(2, EXPERTS, dispatch=DEDUP)), "m"),
    "paired-interleaved": Case(paired(segments(*(Segment(one, one, 1) for one in range(1, 4)))), "mdm", (0, 1, 0)),
    "paired-dense": Case(paired(ONE), "d"),
}
CASES = {**CHUNKS, **DISPATCHES, **TILES, **SEGMENTS, **LAYERS, **STAGES, **PAIRED}
