"""Plans and models whose traced steps are compared with the simulator's lowered steps."""

import dataclasses
from collections.abc import Iterator

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.schedule.plan import (
    ChunkDim,
    DwPolicy,
    Gap,
    LocalTokens,
    OverlapRange,
    Plan,
    Segment,
    fixed_plan,
)
from tests.parity.mocked.lowered_plan import (
    FAST_MS,
    LAYERS_PER_STAGE,
    PIPELINE,
    SLOW_MS,
    Case,
)
from tests.parity.mocked.recorded_run import (
    NUM_STAGES,
    PINNED_BYTES,
)


def segmented(*segments: Segment, **fields) -> Plan:
    return Plan(segments, **{"dw_window": 6, **fields})


def each_stage(num_chunks: int, overlap_range: OverlapRange = OverlapRange.STACK) -> Plan:
    ends = range(LAYERS_PER_STAGE, len(PIPELINE) + 1, LAYERS_PER_STAGE)
    segments = [Segment(end - LAYERS_PER_STAGE + 1, end, num_chunks, range=overlap_range) for end in ends]
    return segmented(*segments)


BATCH, SEQUENCE = ChunkDim
EXPERTS, GATE, STACK = OverlapRange
GAPS = (
    Gap("L4.c0.I.dispatch", ("W.output_layer", "L4.W.mlp.shared_experts.linear_fc1")),
    Gap("L3.c1.I.combine", ("L4.W.self_attention.linear_proj", "L9.W.no_such_layer", "L4.W.self_attention.linear_qkv")),
    Gap("L1.c1.I.combine", ("L3.W.mlp.experts.local_experts.1.linear_fc1", "L2.W.mlp.linear_fc2")),
)


def cases() -> Iterator[tuple[str, Case]]:
    for over in OverlapRange:
        yield f"k1-{over}", Case(fixed_plan(1, overlap_range=over))
        for num_chunks in (2, 3, 4):
            for dim in ChunkDim:
                plan = fixed_plan(num_chunks, chunk_dim=dim, overlap_range=over)
                yield f"k{num_chunks}-{dim}-{over}", Case(plan)
    yield "k5-sequence-stack", Case(fixed_plan(5, chunk_dim=SEQUENCE))
    for num_chunks in (1, 2):
        yield f"k{num_chunks}-dw-none", Case(fixed_plan(num_chunks, DwPolicy.NONE))
        yield f"k{num_chunks}-dw-fill-slow-link", Case(fixed_plan(num_chunks), message_ms=SLOW_MS)
        yield f"k{num_chunks}-dw-fill-fast-link", Case(fixed_plan(num_chunks), message_ms=FAST_MS)
        for num_bytes in (PINNED_BYTES // 2, 3 * PINNED_BYTES + 1):
            plan = fixed_plan(num_chunks, dw_memory_bytes=num_bytes)
            yield f"k{num_chunks}-dw-memory-{num_bytes}", Case(plan, message_ms=FAST_MS)
    yield "k2-dw-memory-medium-link", Case(fixed_plan(2, dw_memory_bytes=5 * PINNED_BYTES))
    for window in (1, 3, 100):
        plan = dataclasses.replace(fixed_plan(2), dw_window=window)
        yield f"k2-dw-window-{window}", Case(plan)
        yield f"k2-dw-window-{window}-gaps", Case(dataclasses.replace(plan, gaps=GAPS))
        yield f"k2-dw-window-{window}-gaps-slow-link", Case(dataclasses.replace(plan, gaps=GAPS), message_ms=SLOW_MS)
    for num_chunks in (1, 2):
        yield f"k{num_chunks}-dw-fitted-gaps", Case(fixed_plan(num_chunks), message_ms=4.0, has_fitted_gaps=True)
    yield from cases_without_polling()
    yield from segment_cases()
    for model in ("no-shared-experts", "full-recompute", "selective-recompute"):
        for num_chunks, dim, over in ((1, BATCH, STACK), (2, BATCH, STACK), (3, SEQUENCE, STACK), (2, BATCH, EXPERTS)):
            yield f"{model}-k{num_chunks}-{over}", Case(fixed_plan(num_chunks, DwPolicy.FILL, dim, over), model)
        yield f"{model}-k2-dw-none", Case(fixed_plan(2, DwPolicy.NONE), model)
    for num_chunks in (1, 2):
        yield f"padded-k{num_chunks}-experts", Case(fixed_plan(num_chunks, overlap_range=EXPERTS), "padded")
    yield "padded-segments", Case(segmented(Segment(1, 2, 1), Segment(3, 3, 2, SEQUENCE, EXPERTS)), "padded")
    for model in ("mtp", "mtp-repeated"):
        for num_chunks, dim, over in ((1, BATCH, STACK), (3, SEQUENCE, STACK), (2, BATCH, EXPERTS)):
            yield f"{model}-k{num_chunks}-{over}", Case(fixed_plan(num_chunks, DwPolicy.FILL, dim, over), model)
        yield f"{model}-k2-stack", Case(fixed_plan(2), model, has_priority=True)
        yield f"{model}-k2-dw-none", Case(fixed_plan(2, DwPolicy.NONE), model)
        yield f"{model}-k2-dw-fitted-gaps", Case(fixed_plan(2), model, message_ms=4.0, has_fitted_gaps=True)
        yield f"{model}-segments", Case(segmented(Segment(1, 3, 2), Segment(4, 4, 3, SEQUENCE)), model)
    for stage in range(NUM_STAGES):
        for num_chunks, over in ((1, STACK), (2, STACK), (2, GATE), (3, STACK)):
            yield f"stage-{stage}-k{num_chunks}-{over}", Case(each_stage(num_chunks, over), f"stage-{stage}")
    yield from hybrid_cases()
    for over in OverlapRange:
        for num_chunks in (1, 2):
            plan = fixed_plan(num_chunks, overlap_range=over)
            yield f"priority-k{num_chunks}-{over}", Case(plan, has_priority=True)
    yield "priority-dw-none", Case(fixed_plan(2, DwPolicy.NONE), has_priority=True)
    for num_chunks, over in ((1, STACK), (2, STACK), (3, STACK)):
        plan = dataclasses.replace(fixed_plan(num_chunks, overlap_range=over), dispatch=DEDUP)
        yield f"dedup-k{num_chunks}-{over}", Case(plan, "full-recompute" if num_chunks == 3 else "shared-experts")
    yield from two_hop_cases()
    yield from tile_cases()
    yield from wired_cases()
    yield "priority-stage-1", Case(each_stage(2), "stage-1", has_priority=True)


def two_hop_cases() -> Iterator[tuple[str, Case]]:
    for num_chunks, dim, over in ((1, BATCH, STACK), (2, BATCH, STACK), (3, SEQUENCE, STACK), (2, BATCH, EXPERTS)):
        plan = fixed_plan(num_chunks, DwPolicy.FILL, dim, over, dispatch=TWO_HOP)
        yield f"two-hop-k{num_chunks}-{over}", Case(plan, "two-nodes", has_priority=True)
    plan = fixed_plan(2, dispatch=TWO_HOP)
    yield "two-hop-k2-slow-link", Case(plan, "two-nodes", message_ms=SLOW_MS, has_priority=True)
    yield "two-hop-k2-fitted-gaps", Case(plan, "two-nodes", message_ms=4.0, has_fitted_gaps=True)
    yield "two-hop-k2-cuda-fitted-gaps", Case(plan, "two-nodes", has_fitted_gaps=True, host_polls=False)


def tile_cases() -> Iterator[tuple[str, Case]]:
    half, after, tiled = LocalTokens
    for num_chunks, tiles, local_tokens in (
        (1, 1, after),
        (1, 2, half),
        (1, 2, tiled),
        (1, 4, after),
        (2, 1, half),
        (2, 3, after),
        (2, 2, tiled),
    ):
        plan = fixed_plan(num_chunks, tiles=tiles, local_tokens=local_tokens)
        yield f"tiles-{tiles}-{local_tokens}-k{num_chunks}", Case(plan, has_priority=True)
    plan = fixed_plan(1, tiles=2)
    yield "tiles-dw-none", Case(fixed_plan(1, DwPolicy.NONE, tiles=2, local_tokens=after), "no-shared-experts")
    yield "tiles-slow-link", Case(plan, message_ms=SLOW_MS)
    yield "tiles-fitted-gaps", Case(plan, message_ms=4.0, has_fitted_gaps=True)
    yield "tiles-cuda-fitted-gaps", Case(plan, has_fitted_gaps=True, host_polls=False)
    yield "tiles-dedup-full-recompute", Case(dataclasses.replace(plan, dispatch=DEDUP), "full-recompute")
    yield "tiles-padded", Case(fixed_plan(1, overlap_range=EXPERTS, tiles=2), "padded")
    yield "tiles-segments", Case(segmented(Segment(1, 2, 2, SEQUENCE), Segment(3, None, 1, tiles=2)))


def wired_cases() -> Iterator[tuple[str, Case]]:
    for num_chunks, dim in ((1, BATCH), (2, BATCH), (3, SEQUENCE)):
        plan = fixed_plan(num_chunks, chunk_dim=dim)
        yield f"wired-pairs-k{num_chunks}", Case(plan, "wired-pairs", has_priority=True)
    for message_ms in (SLOW_MS, FAST_MS):
        yield f"wired-pairs-k1-{message_ms}-ms", Case(fixed_plan(1), "wired-pairs", message_ms)
    yield "wired-pairs-dw-none", Case(fixed_plan(1, DwPolicy.NONE), "wired-pairs")
    yield "wired-pairs-dedup", Case(fixed_plan(1, dispatch=DEDUP), "wired-pairs")
    yield "wired-pairs-fitted-gaps", Case(fixed_plan(1), "wired-pairs", message_ms=4.0, has_fitted_gaps=True)
    yield "wired-pairs-cuda-fitted-gaps", Case(fixed_plan(1), "wired-pairs", has_fitted_gaps=True, host_polls=False)


def cases_without_polling() -> Iterator[tuple[str, Case]]:
    for window in (1, 3, 100):
        plan = dataclasses.replace(fixed_plan(2), dw_window=window)
        yield f"k2-cuda-dw-window-{window}", Case(plan, host_polls=False)
        yield f"k2-cuda-dw-window-{window}-gaps", Case(dataclasses.replace(plan, gaps=GAPS), host_polls=False)
        yield f"k2-cuda-dw-window-{window}-fitted-gaps", Case(plan, has_fitted_gaps=True, host_polls=False)
    for num_chunks, model in ((1, "shared-experts"), (2, "hybrid")):
        plan = fixed_plan(num_chunks, dw_memory_bytes=5 * PINNED_BYTES)
        yield f"{model}-k{num_chunks}-cuda-dw-memory-fitted-gaps", Case(plan, model, 4.0, False, True, False)


def hybrid_cases() -> Iterator[tuple[str, Case]]:
    for over in OverlapRange:
        for num_chunks, dim in ((1, BATCH), (2, BATCH), (3, SEQUENCE)):
            plan = fixed_plan(num_chunks, chunk_dim=dim, overlap_range=over)
            yield f"hybrid-k{num_chunks}-{dim}-{over}", Case(plan, "hybrid")
    yield "hybrid-k2-dw-none", Case(fixed_plan(2, DwPolicy.NONE), "hybrid")
    yield "hybrid-k2-slow-link", Case(fixed_plan(2), "hybrid", message_ms=SLOW_MS)
    yield "hybrid-k2-dw-fitted-gaps", Case(fixed_plan(2), "hybrid", message_ms=4.0, has_fitted_gaps=True)
    yield (
        "hybrid-segments",
        Case(segmented(Segment(1, 2, 2), Segment(3, 4, 1), Segment(5, 5, 2, BATCH, GATE)), "hybrid"),
    )
    yield "hybrid-priority", Case(fixed_plan(2), "hybrid", has_priority=True)


def segment_cases() -> Iterator[tuple[str, Case]]:
    yield "segments-batch-then-sequence", Case(segmented(Segment(1, 2, 2), Segment(3, None, 3, SEQUENCE)))
    yield "segments-whole-then-gate", Case(segmented(Segment(1, 1, 1), Segment(2, 4, 4, BATCH, GATE), gaps=GAPS))
    yield (
        "segments-each-range",
        Case(
            segmented(
                Segment(1, 1, 2, SEQUENCE),
                Segment(2, 2, 1),
                Segment(3, 3, 3, BATCH, EXPERTS),
                Segment(4, 4, 2, SEQUENCE, GATE),
                dw_memory_bytes=4 * PINNED_BYTES,
            )
        ),
    )
    yield (
        "segments-dw-none",
        Case(
            segmented(
                Segment(1, 1, 3, SEQUENCE), Segment(2, 3, 1), Segment(4, 4, 2), dw_policy=DwPolicy.NONE, dw_window=0
            )
        ),
    )
    yield "segments-priority", Case(segmented(Segment(1, 2, 2), Segment(3, None, 1)), has_priority=True)
