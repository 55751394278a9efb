import dataclasses

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.planning.profile import ChunkRouting
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.lowering import (
    COMPUTE,
    COUNTS,
    ISSUE,
    WAIT,
    Lowering,
    backward,
)
from megatron_lancet.planning.simulation.rows import Loads
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.plan import ChunkDim, Dispatch, OverlapRange, Segment

VERBS = {COMPUTE: "", COUNTS: "issue ", ISSUE: "issue ", WAIT: "wait "}
OPS_MS = dict.fromkeys(
    ("attention", "route", "preprocess", "shared_experts", "experts", "postprocess", "mlp", "cut", "head"), 1.0
)


def text_of(steps):
    return [f"{VERBS[code]}L{layer}.c{action.chunk}.{action.kind}" for code, layer, action in steps]


def forward(overlap_range, layers="m", num_chunks=2):
    costs = CostModel(synthetic_profile(Machine(layers=layers, op_ms=OPS_MS)))
    kinds = list(enumerate(costs.model.layer_kinds, start=1))
    segment = Segment(1, len(layers), num_chunks, ChunkDim.BATCH, overlap_range)
    return Lowering(costs, Loads.of(costs.model, None)).forward(kinds, segment)


def turn_1(layer, chunk, *before):
    ops = ["issue {}.counts", "{}.preprocess", "issue {}.dispatch", "{}.shared_experts"]
    return [op.format(f"L{layer}.c{chunk}") for op in [*("{}." + op for op in before), *ops]]


def turn_2(layer, chunk):
    return [op.format(f"L{layer}.c{chunk}") for op in ("wait {}.dispatch", "{}.experts", "issue {}.combine")]


def turn_3(layer, chunk):
    return [f"wait L{layer}.c{chunk}.combine", f"L{layer}.c{chunk}.postprocess"]


BOTH = (0, 1)
CUT = "L0.c0.cut"


def in_turns(*turns):
    return [op for turn in turns for op in turn]


@pytest.mark.parametrize(
    ("overlap_range", "whole", "in_chunks"),
    [
        (OverlapRange.STACK, (), ("attention", "route")),
        (OverlapRange.LAYER, (), ("attention", "route")),
        (OverlapRange.GATE, ("attention",), ("route",)),
        (OverlapRange.EXPERTS, ("attention", "route"), ()),
    ],
)
def test_lowered_layer_in_each_overlap_range(overlap_range, whole, in_chunks):
    assert text_of(forward(overlap_range)) == [
        *(f"L1.c0.{op}" for op in whole),
        *in_turns(*(turn_1(1, chunk, *in_chunks) for chunk in BOTH)),
        *in_turns(*(turn_2(1, chunk) for chunk in BOTH)),
        *in_turns(*(turn_3(1, chunk) for chunk in BOTH)),
        CUT,
    ]


def test_lowered_stack_continues_into_the_next_layer():
    assert text_of(forward(OverlapRange.STACK, "mdm")) == [
        *in_turns(*(turn_1(1, chunk, "attention", "route") for chunk in BOTH)),
        *in_turns(*(turn_2(1, chunk) for chunk in BOTH)),
        *in_turns(
            *(
                [
                    *turn_3(1, chunk),
                    f"L2.c{chunk}.attention",
                    f"L2.c{chunk}.mlp",
                    *turn_1(3, chunk, "attention", "route"),
                ]
                for chunk in BOTH
            )
        ),
        *in_turns(*(turn_2(3, chunk) for chunk in BOTH)),
        *in_turns(*(turn_3(3, chunk) for chunk in BOTH)),
        CUT,
    ]


def test_lowered_dense_layer_is_whole_in_range_experts():
    assert text_of(forward(OverlapRange.GATE, "dm"))[:3] == ["L1.c0.attention", "L1.c0.mlp", "L2.c0.attention"]
    assert text_of(forward(OverlapRange.LAYER, "dm"))[:5] == [
        "L1.c0.attention",
        "L1.c0.mlp",
        "L1.c1.attention",
        "L1.c1.mlp",
        CUT,
    ]


def test_lowered_single_chunk_is_the_same_in_every_range():
    texts = [text_of(forward(one, "md", num_chunks=1)) for one in OverlapRange]
    assert all(text == texts[0] for text in texts)
    assert CUT not in texts[0]


def test_lowered_backward_mirrors_the_forward():
    steps = text_of(backward(forward(OverlapRange.STACK)))
    assert steps[:5] == [CUT, "L1.c1.postprocess", "issue L1.c1.combine", "L1.c0.postprocess", "issue L1.c0.combine"]
    assert steps[5:8] == ["wait L1.c1.combine", "L1.c1.experts", "issue L1.c1.dispatch"]
    assert steps[11:16] == [
        "L1.c1.shared_experts",
        "wait L1.c1.dispatch",
        "L1.c1.preprocess",
        "L1.c1.route",
        "L1.c1.attention",
    ]
    assert not any("counts" in step for step in steps)


def test_ranks_with_equal_shares_are_simulated_once():
    model = synthetic_profile(Machine(shares=(0.3, 0.2, 0.3, 0.2))).model
    assert Loads.of(model, (0.3, 0.2, 0.3, 0.2)).simulated == (0, 1)
    assert Loads.of(model, None).shares == (0.25,) * 4


def test_lowered_messages_have_the_bytes_that_a_rank_sends():
    """Three quarters of all rows go to rank 0; a quarter of its own leave it."""
    costs = CostModel(synthetic_profile(Machine(shares=(0.75, 0.25))))
    steps = Lowering(costs, Loads.of(costs.model, (0.75, 0.25))).forward([(1, LayerKind.MOE)], Segment(1, 1, 1))
    sent = {action.kind: (action.forward_bytes, action.backward_bytes) for code, _, action in steps if code == ISSUE}
    rows = 8 * 64
    quarter, most = rows // 4 * 1000, rows * 3 // 4 * 1000
    assert sent == {"dispatch": ((quarter, most), (most, quarter)), "combine": ((most, quarter), (quarter, most))}


def sent_by_dedup(profile):
    """Bytes of the messages of a micro-batch in one chunk, forward and backward, by kind."""
    costs = CostModel(profile)
    steps = Lowering(costs, Loads.measured(profile)).forward(
        [(1, LayerKind.MOE)], Segment(1, 1, 1), dispatch=Dispatch.DEDUP
    )
    return {action.kind: (action.forward_bytes, action.backward_bytes) for code, _, action in steps if code == ISSUE}


def test_lowered_dedup_messages_have_bytes_of_distinct_rows():
    """With 2 of 4 experts on each rank, 5 of 6 pairs of experts have one on the other rank: a row where 6 were."""
    profile = synthetic_profile(Machine(topk=2))
    assert (profile.model.dedup_row_bytes, profile.model.dedup_grad_row_bytes) == (1024, 1024)
    expected = round(8 * 64 * 5 / 6)
    assert sent_by_dedup(profile) == {
        "dispatch": ((expected * 1024,), (expected * 1024,)),
        "combine": ((expected * 1000,), (expected * 1000,)),
    }


def test_lowered_dedup_messages_have_recorded_rows():
    profile = synthetic_profile(Machine(topk=2))
    routing = ChunkRouting(1, ChunkDim.BATCH, 1, 0, (600, 300), (724, 1324), (400, 210), (210, 400))
    recorded = dataclasses.replace(profile, routing=(routing,))
    assert sent_by_dedup(recorded) == {
        "dispatch": ((400 * 1024, 210 * 1024), (210 * 1024, 400 * 1024)),
        "combine": ((210 * 1000, 400 * 1000), (400 * 1000, 210 * 1000)),
    }
    of_before = dataclasses.replace(routing, sent_tokens=None, received_tokens=None)
    by_rows = sent_by_dedup(dataclasses.replace(profile, routing=(of_before,)))
    assert by_rows["dispatch"][0] == (round(600 * 5 / 6) * 1024, round(300 * 5 / 6) * 1024)
