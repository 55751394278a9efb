"""Rows of a chunk in tiles: what each part costs, and what a step of such a plan takes."""

import dataclasses

import pytest

from benchmarks.synthetic_profile import ROW_BYTES, Machine, synthetic_profile
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.planning.profile import ChunkRouting, OpTime
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.lowering import Lowering, backward
from megatron_lancet.planning.simulation.rows import Loads
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import Compute, Launch, OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, LocalTokens, Segment, fixed_plan

TOKENS = 8 * 64
EXPERTS_MS = 8.0
DW_MS = 3.0
MACHINE = Machine(
    layers="m",
    op_ms={"attention": 1.0, "route": 0.0, "preprocess": 0.0, "experts": EXPERTS_MS, "postprocess": 0.0},
    dw_ms={OpKind.EXPERTS: DW_MS},
    overhead_ms=0.0,
    latency_ms=0.5,
    link_ms=4.5,
    counts_ms=0.0,
    rest_ms=0.0,
    topk=1,
)
"""A message of all rows of other ranks takes 4 ms and a latency; each row of the experts as long as the next."""


def lowered(tiles, local_tokens=LocalTokens.HALF, profile=None, num_chunks=1, dispatch=PLAIN):
    profile = profile or synthetic_profile(MACHINE)
    segment = Segment(1, 1, num_chunks, tiles=tiles, local_tokens=local_tokens)
    lowering = Lowering(CostModel(profile), Loads.measured(profile))
    return lowering.forward([(1, LayerKind.MOE)], segment, dispatch)


def parts_ms(steps, column=0):
    kinds = (OpKind.OWN_EXPERTS, OpKind.EXPERTS)
    return [action.forward_ms[column] for verb, _, action in steps if verb is Compute and action.kind in kinds]


def sent_bytes(steps):
    return [(action.kind, action.tile, action.forward_bytes) for verb, _, action in steps if verb is Launch]


@pytest.mark.parametrize(("local_tokens", "parts"), [("half", [2, 2, 2, 2]), ("after", [2, 2, 4]), ("tiled", [4, 4])])
def test_each_part_of_the_experts_costs_its_rows(local_tokens, parts):
    """Of 512 rows in 8 ms a half stays on the rank, and the other half comes in two tiles; or all are in the tiles."""
    steps = lowered(2, LocalTokens(local_tokens))
    assert parts_ms(steps) == parts
    # The one gradient of each weight, over all rows, is put by the part that runs last in the backward.
    parts_put = [action.weight_grads[0] for verb, _, action in backward(steps) if "experts" in action.kind]
    assert [len(grads) for grads in parts_put] == [0] * (len(parts) - 1) + [1]
    assert (parts_put[-1][0].ms, parts_put[-1][0].pinned_bytes) == (DW_MS, MACHINE.pinned_bytes)


def test_tiles_of_measured_rows_are_as_equal_as_possible():
    routing = ChunkRouting(1, ChunkDim.BATCH, 1, 0, sent=(301, 200), received=(411, 613))
    profile = dataclasses.replace(synthetic_profile(MACHINE), routing=(routing,))
    steps = lowered(2, LocalTokens.AFTER, profile)
    assert sent_bytes(steps) == [
        ("dispatch", 0, (150 * ROW_BYTES, 100 * ROW_BYTES)),
        ("dispatch", 1, (151 * ROW_BYTES, 100 * ROW_BYTES)),
        ("combine", 0, (100 * ROW_BYTES, 150 * ROW_BYTES)),
        ("combine", 1, (100 * ROW_BYTES, 151 * ROW_BYTES)),
    ]
    # 211 and 312 rows stay; 200 and 301 come from the other rank.
    per_row = EXPERTS_MS / TOKENS
    assert parts_ms(steps) == pytest.approx([100 * per_row, 100 * per_row, 211 * per_row])
    assert parts_ms(steps, 1) == pytest.approx([150.5 * per_row, 150.5 * per_row, 312 * per_row])


def test_distinct_rows_are_split_in_the_same_way():
    """See ``test_lowered_messages_without_duplicates``: 5 of 6 tokens go to the other rank."""
    profile = synthetic_profile(dataclasses.replace(MACHINE, topk=2))
    rows = round(TOKENS * 5 / 6)
    steps = lowered(3, profile=profile, dispatch=DEDUP)
    row_bytes = profile.model.row_bytes_to(profile.model.ep_size)
    sent = [num_bytes[0] // row_bytes for _, _, num_bytes in sent_bytes(steps)[:3]]
    assert rows == 427
    assert sent == [142, 142, 143]


def test_messages_of_tiles_have_names_and_wait_for_one_counts():
    """Of two chunks with two tiles each, with a host that polls and with one that enqueues ahead."""
    for host_polls in (True, False):
        profile = synthetic_profile(dataclasses.replace(MACHINE, host_polls=host_polls, counts_ms=0.25))
        simulation = Simulator(CostModel(profile)).simulate(fixed_plan(2, tiles=2))
        names = [span.name for span in simulation.timelines[0].spans if span.lane == "comm"]
        assert len(names) == len(set(names)) == 2 * 2 * 4
        dispatches = {span.name: span for span in simulation.timelines[0].spans if span.name.endswith("F.dispatch")}
        assert {"L1.c0.t0.F.dispatch", "L1.c1.t1.F.dispatch"} <= set(dispatches)


def test_a_step_with_one_tile_takes_what_its_lanes_take():
    """Attention 1; the message 4.5; half of the local tokens 2 during it; tile 4; back 4.5, during it the other half.

    The backward is the mirror: 4.5, during it 2; 4; 4.5, during it 2 and the weight gradient of 3; attention 1.
    """
    simulator = Simulator(CostModel(synthetic_profile(MACHINE)))
    one_way = 1 + 4.5 + 4 + 4.5
    assert simulator.predict(fixed_plan(1, tiles=1)).step_ms == pytest.approx(2 * one_way + (2 + 3 - 4.5))
    in_stock = simulator.predict(fixed_plan(1, DwPolicy.NONE)).step_ms
    assert in_stock == pytest.approx(2 * (1 + 4.5 + 8 + 4.5) + 3)


def test_every_tile_pays_the_latency_of_a_message():
    """Of 4 ms of rows in two tiles the first is here after 2.5 ms, the second, behind it, 2 ms later.

    Forward: attention 1; tile 0 at 3.5, when the first half of the local tokens has long run; its experts until 5.5,
        when
    tile 1 is here; its experts until 7.5, local tokens until 9.5. Outputs of tile 0 leave at 5.5, of tile 1 at
    7.5 but behind them until 8; so they are back at 8 and 10. If a message behind another also pays the latency, tile 1
    is here at 6, outputs of tile 0 leave behind it and are back at 8.5, outputs of tile 1 behind them at 11.
    """
    simulator = Simulator(CostModel(synthetic_profile(dataclasses.replace(MACHINE, dw_ms={}))))
    alone = simulator.predict(fixed_plan(1, tiles=2))
    queued = dataclasses.replace(simulator.costs.profile.link, queued=((0, 0.0), (TOKENS // 2 * ROW_BYTES, 4.0)))
    profile = dataclasses.replace(simulator.costs.profile, link=queued)
    assert Simulator(CostModel(profile)).predict(fixed_plan(1, tiles=2)).forward_ms == pytest.approx(10)
    assert alone.forward_ms == pytest.approx(11)


def test_measured_tiles_scale_the_experts_of_as_few_rows():
    """A part of 128 rows takes 2 ms without tiles; it was measured with 3, and local tokens with 2.5."""
    profile = synthetic_profile(MACHINE)
    one = OpTime(LayerKind.MOE, OpKind.EXPERTS, Phase.FORWARD, ChunkDim.BATCH, 1, 0, 128, 3.0, tiles=2)
    own = dataclasses.replace(one, kind=OpKind.OWN_EXPERTS, ms=2.5)
    profile = dataclasses.replace(profile, ops=(*profile.ops, one, own))
    assert parts_ms(lowered(2, profile=profile)) == pytest.approx([2.5, 3.0, 3.0, 2.5])
    assert parts_ms(lowered(1, LocalTokens.AFTER, profile)) == pytest.approx([6.0, 5.0])
    assert parts_ms(lowered(0, profile=profile)) == [EXPERTS_MS]
