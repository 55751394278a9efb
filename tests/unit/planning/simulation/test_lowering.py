import dataclasses

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.planning.profile import ChunkRouting
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.lowering import (
    Lowering,
)
from megatron_lancet.planning.simulation.rows import Chunk, Loads, Pieces, RowCounts, Rows
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import Launch
from megatron_lancet.schedule.plan import ChunkDim, Segment


def test_ranks_with_equal_shares_are_simulated_once():
    model = synthetic_profile(Machine(shares=(0.3, 0.2, 0.3, 0.2))).model
    assert Loads.of(model, (0.3, 0.2, 0.3, 0.2)).simulated == (0, 1)
    assert Loads.of(model, None).shares == (0.25,) * 4


def test_lowered_messages_have_the_bytes_that_a_rank_sends():
    """Three quarters of all rows go to rank 0; a quarter of its own leave it."""
    costs = CostModel(synthetic_profile(Machine(shares=(0.75, 0.25))))
    steps = Lowering(costs, Loads.of(costs.model, (0.75, 0.25))).forward([(1, LayerKind.MOE)], Segment(1, 1, 1))
    sent = {action.kind: (action.forward_bytes, action.backward_bytes) for verb, _, action in steps if verb is Launch}
    rows = 8 * 64
    quarter, most = rows // 4 * 1000, rows * 3 // 4 * 1000
    assert sent == {"dispatch": ((quarter, most), (most, quarter)), "combine": ((most, quarter), (quarter, most))}


def sent_by_dedup(profile):
    """Bytes of the messages of a micro-batch in one chunk, forward and backward, by kind."""
    costs = CostModel(profile)
    steps = Lowering(costs, Loads.measured(profile)).forward([(1, LayerKind.MOE)], Segment(1, 1, 1), dispatch=DEDUP)
    return {action.kind: (action.forward_bytes, action.backward_bytes) for verb, _, action in steps if verb is Launch}


def test_lowered_dedup_messages_have_bytes_of_distinct_rows():
    """With 2 of 4 experts on each rank, 5 of 6 pairs of experts have one on the other rank: a row where 6 were."""
    profile = synthetic_profile(Machine(topk=2))
    assert profile.model.row_bytes_to(profile.model.ep_size) == 1024
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
    without = dataclasses.replace(routing, sent_tokens=None, received_tokens=None)
    by_rows = sent_by_dedup(dataclasses.replace(profile, routing=(without,)))
    assert by_rows["dispatch"][0] == (round(600 * 5 / 6) * 1024, round(300 * 5 / 6) * 1024)


def test_rows_that_stay_follow_from_what_was_recorded():
    """A capacity dropped half of the rows of 8 x 64 tokens: 256 rows of each rank, 128 of them to the other one."""
    profile = synthetic_profile(Machine())
    routing = ChunkRouting(1, ChunkDim.BATCH, 1, 0, (128, 128), (256, 256))
    costs = CostModel(dataclasses.replace(profile, routing=(routing,)))
    counts = RowCounts(costs, Loads.measured(costs.profile))
    chunk = Chunk(Pieces(), 0, routing)
    assert counts.kept(chunk) == [128, 128]
    assert counts.sent(chunk) == Rows([128, 128], [128, 128])


def test_rows_that_a_capacity_adds_are_in_all_chunks():
    """Padded to 1.25 times the even rows, a rank's experts get 640 rows of 8 x 64 tokens of each rank."""
    routing = ChunkRouting(1, ChunkDim.BATCH, 1, 0, (320, 320), (640, 640))
    costs = CostModel(dataclasses.replace(synthetic_profile(Machine()), routing=(routing,)))
    recorded = RowCounts(costs, Loads.measured(costs.profile)).sent(Chunk(Pieces(), 0, routing))
    by_shares = RowCounts(costs, Loads.of(costs.model, (0.5, 0.5)))
    assert recorded == Rows([320, 320], [320, 320])
    assert by_shares.sent(Chunk(Pieces(), 0)) == Rows([320], [320])
    assert by_shares.received(Chunk(Pieces(ChunkDim.BATCH, 2), 1)) == [320]
