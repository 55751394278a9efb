"""Programs of three segments as text written by hand; ``programs/`` has frozen ones of all plans.

A line is what one chunk does until the next one goes on.
"""

import pytest

from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.planning.verbs import is_cut
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.plan import LocalTokens, OverlapRange
from megatron_lancet.schedule.turns import (
    ROWS_MADE_BY,
    ROWS_NEEDED_BY,
    Compute,
    Instruction,
    Launch,
    LaunchCounts,
    Wait,
    mtp_layer,
    program,
    verbs_of,
)

ALL_KINDS = {"m": LayerKind.MOE, "d": LayerKind.DENSE, "*": LayerKind.ATTENTION_ONLY, "E": LayerKind.MOE_ONLY}
ALL_KINDS |= {"-": LayerKind.MLP_ONLY}
KINDS = {**ALL_KINDS, "h": LayerKind.MOE, "H": LayerKind.MOE_ONLY, "t": LayerKind.MOE, "T": LayerKind.MOE_ONLY}
LAYERS = {letter: verbs_of(kind, has_shared_experts=True) for letter, kind in ALL_KINDS.items()}
LAYERS["n"] = verbs_of(LayerKind.MOE, has_shared_experts=False)
LAYERS |= {"p": mtp_layer(LAYERS["d"]), "q": mtp_layer(LAYERS["n"])}
LAYERS["h"] = verbs_of(LayerKind.MOE, has_shared_experts=True, dispatch=TWO_HOP)
LAYERS["H"] = verbs_of(LayerKind.MOE_ONLY, has_shared_experts=False, dispatch=TWO_HOP)
LAYERS["t"] = verbs_of(LayerKind.MOE, has_shared_experts=True, dispatch=PLAIN.in_tiles(2))
LAYERS["T"] = verbs_of(LayerKind.MOE_ONLY, has_shared_experts=False, dispatch=PLAIN.in_tiles(1, LocalTokens.AFTER))
TWO_CHUNKS_STACK = """
cut
L1.c0.F.attention, L1.c0.F.mlp, L2.c0.F.attention, L2.c0.F.route, launch L2.c0.F.counts, L2.c0.F.preprocess,\
 launch L2.c0.F.dispatch, L2.c0.F.shared_experts
L1.c1.F.attention, L1.c1.F.mlp, L2.c1.F.attention, L2.c1.F.route, launch L2.c1.F.counts, L2.c1.F.preprocess,\
 launch L2.c1.F.dispatch, L2.c1.F.shared_experts
wait L2.c0.F.dispatch, L2.c0.F.experts, launch L2.c0.F.combine
wait L2.c1.F.dispatch, L2.c1.F.experts, launch L2.c1.F.combine
wait L2.c0.F.combine, L2.c0.F.postprocess, add residual in L2.c0.F.postprocess, L3.c0.F.attention, L3.c0.F.mlp
wait L2.c1.F.combine, L2.c1.F.postprocess, add residual in L2.c1.F.postprocess, L3.c1.F.attention, L3.c1.F.mlp
concatenate
"""
TILES_EXPERTS = """
L1.c0.F.norm, L1.c0.F.route
cut
launch L1.c0.F.counts, L1.c0.F.preprocess, launch L1.c0.t0.F.dispatch
launch L1.c1.F.counts, L1.c1.F.preprocess, launch L1.c1.t0.F.dispatch
wait L1.c0.t0.F.dispatch, L1.c0.t0.F.experts, launch L1.c0.t0.F.combine, L1.c0.F.own_experts
wait L1.c1.t0.F.dispatch, L1.c1.t0.F.experts, launch L1.c1.t0.F.combine, L1.c1.F.own_experts
wait L1.c0.t0.F.combine, L1.c0.F.postprocess
wait L1.c1.t0.F.combine, L1.c1.F.postprocess
concatenate
add residual in L1.c0.F.postprocess
"""
ONE_CHUNK = """
L1.c0.F.attention, L1.c0.F.route, launch L1.c0.F.counts, L1.c0.F.preprocess, launch L1.c0.F.dispatch
L1.c0.F.shared_experts
wait L1.c0.F.dispatch, L1.c0.F.experts, launch L1.c0.F.combine
wait L1.c0.F.combine, L1.c0.F.postprocess, add residual in L1.c0.F.postprocess
L2.c0.F.attention, L2.c0.F.mlp
"""


def text_of(layers: str, num_chunks: int, overlap_range: OverlapRange) -> list[str]:
    numbered = [(number, LAYERS[letter]) for number, letter in enumerate(layers, start=1)]
    return [str(instruction) for instruction in program(numbered, num_chunks, overlap_range)]


def instructions_in(text: str) -> list[str]:
    return [instruction for line in text.strip().splitlines() for instruction in line.split(", ")]


@pytest.mark.parametrize(
    ("layers", "num_chunks", "overlap_range", "text"),
    [
        ("dmd", 2, OverlapRange.STACK, TWO_CHUNKS_STACK),
        ("T", 2, OverlapRange.EXPERTS, TILES_EXPERTS),
        *(("md", 1, overlap_range, ONE_CHUNK) for overlap_range in OverlapRange),
    ],
)
def test_program_of_a_segment_equals_the_golden_text(layers, num_chunks, overlap_range, text):
    assert text_of(layers, num_chunks, overlap_range) == instructions_in(text)


def test_moe_layer_without_shared_experts_has_all_other_verbs():
    assert [verb for verb in LAYERS["m"] if verb not in LAYERS["n"]] == [Compute(OpKind.SHARED_EXPERTS)]


@pytest.mark.parametrize(("num_chunks", "missing"), [(1, [LaunchCounts(OpKind.COUNTS)]), (2, [])])
def test_padded_experts_need_counts_of_chunks_only(num_chunks, missing):
    padded = verbs_of(LayerKind.MOE, has_shared_experts=True, pads_to_capacity=True, num_chunks=num_chunks)
    assert [verb for verb in LAYERS["m"] if verb not in padded] == missing


@pytest.mark.parametrize("letter", KINDS)
@pytest.mark.parametrize("overlap_range", OverlapRange)
def test_op_is_cut_where_its_layer_runs_it_in_two_chunks(letter, overlap_range):
    computed = [one for one in program([(1, LAYERS[letter])], 2, overlap_range) if isinstance(one, Instruction)]
    in_chunks = {one.verb.kind for one in computed if one.chunk == 1}
    for kind in {verb.kind for verb in LAYERS[letter]}:
        assert is_cut(KINDS[letter], kind, overlap_range) == (kind in in_chunks)


def test_messages_have_ops_that_make_and_that_need_their_rows():
    """Each hop has its own, so the maps need not know how many hops a plan has."""
    assert ROWS_MADE_BY == {
        "dispatch": "preprocess",
        "combine": "experts",
        "node_dispatch": "preprocess",
        "local_dispatch": "node_rows",
        "local_combine": "experts",
        "node_combine": "node_sums",
    }
    assert ROWS_NEEDED_BY == {
        "dispatch": "experts",
        "combine": "postprocess",
        "node_dispatch": "node_rows",
        "local_dispatch": "experts",
        "local_combine": "node_sums",
        "node_combine": "postprocess",
    }


@pytest.mark.parametrize("dispatch", Dispatch.known().values())
def test_a_layer_waits_for_as_many_messages_as_its_dispatch_says(dispatch):
    layer = verbs_of(LayerKind.MOE, has_shared_experts=True, dispatch=dispatch)
    waited, launched = ([verb.kind for verb in layer if isinstance(verb, of)] for of in (Wait, Launch))
    assert waited == launched
    assert len(waited) == dispatch.all_to_alls_per_layer


def test_verbs_of_the_same_op_are_different_keys():
    verbs = [Compute, LaunchCounts, Launch, Wait]
    assert len({verb(OpKind.DISPATCH) for verb in verbs}) == len(verbs)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_every_verb_of_a_layer_has_one_function_and_no_other_has(layer):
    from megatron_lancet.features.mtp import model as mtp
    from megatron_lancet.features.tiles import ops as tiles
    from megatron_lancet.features.two_hop import ops as two_hop
    from megatron_lancet.model import moe_layer as experts
    from megatron_lancet.model import transformer_layer

    functions = {*transformer_layer.OPS, *mtp.OPS, *experts.OPS, *tiles.OPS, *two_hop.OPS}
    assert {verb.untiled for verb in layer} <= functions
    assert functions == {verb.untiled for verbs in LAYERS.values() for verb in verbs}
    assert not {*transformer_layer.OPS, *mtp.OPS} & {*experts.OPS, *tiles.OPS, *two_hop.OPS}
