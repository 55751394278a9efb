import dataclasses
import json

import pytest

from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.files.reader import RecordError
from megatron_lancet.schedule.plan import (
    ChunkDim,
    DwPolicy,
    Gap,
    LocalTokens,
    OverlapRange,
    Pairing,
    Plan,
    Segment,
    fixed_plan,
    paired,
)
from tests.plan_text import read_plan

GAP = Gap("L3.c0.I.combine", ("L4.W.mlp.linear_fc1", "L4.W.mlp.linear_fc1"))
SEGMENTS = Plan(
    (Segment(1, 2, 2), Segment(3, None, 4, ChunkDim.SEQUENCE, OverlapRange.GATE)),
    dw_window=8,
    dw_memory_bytes=64_500_000,
    gaps=(GAP,),
)

MIXED = paired(fixed_plan(1), dataclasses.replace(fixed_plan(2), gaps=(GAP,)))


def test_plan_is_printed_as_text():
    assert str(fixed_plan(2)) == "chunks=2 dim=batch range=stack dw=fill dw-window=4"
    assert str(SEGMENTS) == (
        "layers 1-2: chunks=2 dim=batch range=stack, layers 3-end: chunks=4 dim=sequence range=gate; "
        "dw=fill dw-window=8 dw-memory=64.5MB"
    )


def test_plan_is_written_as_json():
    assert json.loads(SEGMENTS.to_json()) == {
        "version": 3,
        "segments": [
            {"first_layer": 1, "last_layer": 2, "num_chunks": 2, "chunk_dim": "batch", "range": "stack"},
            {"first_layer": 3, "last_layer": None, "num_chunks": 4, "chunk_dim": "sequence", "range": "gate"},
        ],
        "dw_policy": "fill",
        "dw_window": 8,
        "dw_memory_bytes": 64500000,
        "gaps": [{"op": "L3.c0.I.combine", "weight_grads": ["L4.W.mlp.linear_fc1", "L4.W.mlp.linear_fc1"]}],
    }


@pytest.mark.parametrize(
    "plan", [SEGMENTS, fixed_plan(2), fixed_plan(1, DwPolicy.NONE), paired(SEGMENTS), MIXED], ids=str
)
def test_plan_is_read_from_json_as_written(plan):
    again = read_plan(plan.to_json())
    assert again == plan
    assert again.fingerprint() == plan.fingerprint()


def test_a_multiple_is_written_where_there_is_one():
    multiple = fixed_plan(2, chunk_multiple=16)
    assert str(multiple) == "chunks=2 dim=batch range=stack multiple=16 dw=fill dw-window=4"
    assert json.loads(multiple.to_json())["segments"][0]["chunk_multiple"] == 16
    assert read_plan(multiple.to_json()) == multiple
    assert "chunk_multiple" not in fixed_plan(2).to_json()


def test_tiles_are_written_where_there_are_any():
    tiled = fixed_plan(1, tiles=2, local_tokens=LocalTokens.AFTER)
    assert str(tiled) == "chunks=1 dim=batch range=stack tiles=2 local-tokens=after dw=fill dw-window=4"
    assert tiled.has_tiles
    assert not tiled.overlaps_nothing
    assert read_plan(tiled.to_json()) == tiled
    assert tiled.fingerprint() != fixed_plan(1, tiles=2).fingerprint() != fixed_plan(1).fingerprint()
    plain = fixed_plan(2).to_json()
    assert "tiles" not in plain
    assert "local_tokens" not in plain
    assert not read_plan(plain).has_tiles
    assert paired(fixed_plan(1), tiled).has_tiles


def test_tiles_are_of_messages_to_ranks():
    with pytest.raises(ValueError, match="tiles need dispatch plain or dedup, not two-hop"):
        fixed_plan(1, dispatch=TWO_HOP, tiles=2)
    with pytest.raises(ValueError, match="tiles must be at least 0, not -1"):
        Segment(1, None, 1, tiles=-1)


def test_plan_fingerprint_depends_on_every_field():
    first, second = SEGMENTS.segments
    seconds = [
        dataclasses.replace(second, last_layer=9),
        dataclasses.replace(second, num_chunks=3),
        dataclasses.replace(second, chunk_multiple=16),
        dataclasses.replace(second, chunk_dim=ChunkDim.BATCH),
        dataclasses.replace(second, range=OverlapRange.STACK),
    ]
    others = [
        *(dataclasses.replace(SEGMENTS, segments=(first, other)) for other in seconds),
        dataclasses.replace(SEGMENTS, segments=(dataclasses.replace(second, first_layer=1),)),
        dataclasses.replace(SEGMENTS, dw_policy=DwPolicy.NONE),
        dataclasses.replace(SEGMENTS, dw_window=5),
        dataclasses.replace(SEGMENTS, dw_memory_bytes=None),
        dataclasses.replace(SEGMENTS, gaps=()),
        dataclasses.replace(SEGMENTS, gaps=(dataclasses.replace(GAP, op="L3.c1.I.combine"),)),
        dataclasses.replace(SEGMENTS, gaps=(dataclasses.replace(GAP, weight_grads=GAP.weight_grads[:1]),)),
    ]
    assert len({plan.fingerprint() for plan in (SEGMENTS, *others)}) == 13


def test_a_plan_with_pairing_is_printed_as_text():
    assert str(paired(fixed_plan(1))) == "chunks=1 dim=batch range=stack dw=fill dw-window=2 paired"
    assert str(MIXED) == (
        "chunks=1 dim=batch range=stack dw=fill dw-window=2 "
        "paired (at the ends chunks=2 dim=batch range=stack dw-window=4)"
    )


def test_pairing_is_written_where_there_is_one():
    assert "pairing" not in SEGMENTS.to_json()
    ends = {"first_layer": 1, "last_layer": None, "num_chunks": 2, "chunk_dim": "batch", "range": "stack"}
    assert json.loads(MIXED.to_json())["pairing"] == {
        "end_segments": [ends],
        "end_dw_window": 4,
        "end_gaps": [{"op": "L3.c0.I.combine", "weight_grads": ["L4.W.mlp.linear_fc1", "L4.W.mlp.linear_fc1"]}],
    }


def test_plan_fingerprint_depends_on_every_field_of_the_pairing():
    ends = MIXED.pairing
    assert ends is not None
    others = [
        dataclasses.replace(ends, end_segments=fixed_plan(3).segments),
        dataclasses.replace(ends, end_dw_window=5),
        dataclasses.replace(ends, end_gaps=()),
    ]
    plans = [fixed_plan(1), MIXED, *(dataclasses.replace(MIXED, pairing=other) for other in others)]
    assert len({plan.fingerprint() for plan in plans}) == 5


def test_plan_with_pairing_has_settings_of_middle_and_of_ends():
    middle, ends = SEGMENTS, dataclasses.replace(fixed_plan(8), dw_memory_bytes=SEGMENTS.dw_memory_bytes)
    plan = paired(middle, ends)
    assert (plan.in_middle, plan.at_ends) == (middle, ends)
    assert plan.num_chunks == 8
    assert paired(middle).at_ends == middle
    assert (middle.in_middle, middle.at_ends) == (middle, middle)


def test_plan_that_waits_for_each_message_overlaps_nothing():
    nothing = fixed_plan(1, DwPolicy.NONE)
    assert nothing.overlaps_nothing
    overlapping = (fixed_plan(1), fixed_plan(2, DwPolicy.NONE), paired(nothing))
    assert [plan.overlaps_nothing for plan in overlapping] == [False] * 3
    assert [plan.is_paired for plan in (nothing, *overlapping)] == [False, False, False, True]


@pytest.mark.parametrize("ends", [fixed_plan(1, DwPolicy.NONE), fixed_plan(1, dw_memory_bytes=1), paired(SEGMENTS)])
def test_settings_of_ends_are_of_one_plan_with_those_of_middle(ends):
    """What a rank defers at all, and how much memory it may hold, does not change within a step."""
    with pytest.raises(AssertionError):
        paired(fixed_plan(1), ends)


def test_settings_of_the_ends_are_checked_as_those_of_the_middle():
    with pytest.raises(ValueError, match="dw_window 0 is too small for dw_policy fill"):
        dataclasses.replace(SEGMENTS, pairing=Pairing(SEGMENTS.segments))
    with pytest.raises(ValueError, match="a segment starts at layer 2, expected 1"):
        dataclasses.replace(SEGMENTS, pairing=Pairing((Segment(2, None, 1),), 2))


def changed(path: str, value: object, plan: Plan = SEGMENTS) -> str:
    """JSON of a plan with one field set (or dropped, for ``...``)."""
    record = json.loads(plan.to_json())
    *parents, name = path.split(".")
    owner = record
    for parent in parents:
        owner = owner[int(parent) if parent.isdigit() else parent]
    if value is ...:
        del owner[name]
    else:
        owner[name] = value
    return json.dumps(record)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.json: no JSON"),
        (SEGMENTS.to_json()[:-20], "p.json: no JSON"),
        ("[" * 100_000, "p.json: no JSON"),
        ("[]", "p.json: expected an object, found list"),
        ("null", "p.json: expected an object, found NoneType"),
        ("{}", "p.json: expected version 3 of the plan's format, found None"),
        (changed("version", 2), "p.json: expected version 3 of the plan's format, found 2"),
        (changed("version", "3"), "p.json: expected version 3 of the plan's format, found '3'"),
        (changed("colour", "red"), "p.json: unknown field 'colour'; known: segments, dw_policy, "),
        (changed("segments", ...), "p.json: field 'segments' is missing"),
        (changed("segments", []), "p.json: a plan has at least one segment"),
        (changed("segments", {}), "p.json.segments: expected a list, found {}"),
        (changed("segments.0.num_chunks", ...), "p.json.segments[0]: field 'num_chunks' is missing"),
        (changed("segments.0.num_chunks", "2"), "p.json.segments[0].num_chunks: expected an integer, found '2'"),
        (changed("segments.0.num_chunks", 2.0), "p.json.segments[0].num_chunks: expected an integer, found 2.0"),
        (changed("segments.0.num_chunks", True), "p.json.segments[0].num_chunks: expected an integer, found True"),
        (changed("segments.0.num_chunks", 0), "p.json.segments[0]: num_chunks must be at least 1, not 0"),
        (changed("segments.0.chunk_multiple", 0), "p.json.segments[0]: chunk_multiple must be at least 1, not 0"),
        (changed("segments.0.chunk_dim", "hidden"), "chunk_dim: expected one of batch, sequence, found 'hidden'"),
        (changed("segments.0.range", ["stack"]), "p.json.segments[0].range: expected one of experts, gate, stack, f"),
        (changed("segments.1.first_layer", 4), "p.json: a segment starts at layer 4, expected 3"),
        (changed("segments.0.last_layer", None), "p.json: a segment starts at layer 3, expected none more"),
        (changed("segments.0.last_layer", 0), "p.json.segments[0]: layers 1 to 0 are no segment"),
        (changed("segments.0.depth", 1), "p.json.segments[0]: unknown field 'depth'"),
        (changed("dw_window", None), "p.json.dw_window: expected an integer, found None"),
        (changed("dw_window", 0), "p.json: dw_window 0 is too small for dw_policy fill"),
        (changed("dw_memory_bytes", -1), "p.json: dw_memory_bytes must be above 0, not -1"),
        (changed("gaps.0.op", 3), "p.json.gaps[0].op: expected text, found 3"),
        (changed("gaps.0.weight_grads", "L1"), "p.json.gaps[0].weight_grads: expected a list, found 'L1'"),
        (changed("pairing", {}), "p.json.pairing: field 'end_segments' is missing"),
        (changed("pairing.end_segments", [], MIXED), "p.json: a plan has at least one segment"),
        (changed("pairing.end_dw_window", 0, MIXED), "p.json: dw_window 0 is too small for dw_policy fill"),
        (changed("pairing.end_gaps.0.op", 3, MIXED), "p.json.pairing.end_gaps[0].op: expected text, found 3"),
        (changed("pairing.turns", 2, MIXED), "p.json.pairing: unknown field 'turns'"),
    ],
)
def test_damaged_plan_is_refused_with_its_place(text, message):
    with pytest.raises(RecordError) as refusal:
        read_plan(text, "p.json")
    assert message in str(refusal.value)
    assert len(str(refusal.value)) < 300


def test_layers_have_their_segment():
    first, second = SEGMENTS.segments
    assert [SEGMENTS.segment_of(layer) for layer in (1, 2, 3, 96)] == [first, first, second, second]
    assert SEGMENTS.num_chunks == 4


def test_fixed_plan_defers_dws_over_one_layer():
    # Dispatch and combine of each chunk.
    assert fixed_plan(3) == Plan((Segment(1, None, 3, ChunkDim.BATCH, OverlapRange.STACK),), DwPolicy.FILL, dw_window=6)
    assert fixed_plan(3, DwPolicy.NONE).dw_window == 0
    assert fixed_plan(3, tiles=2).dw_window == 12
