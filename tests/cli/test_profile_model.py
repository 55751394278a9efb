"""lancet plan profile on two real ranks: a profile that reads back, of the model that was asked for."""

import re

import pytest

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.planning.profile import read_profile
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.plan import ChunkDim
from tests.ranks import launch
from tests.ranks.pretraining import EP2, command_line

TOOL = launch.REPO / "tools/plans/profile_model.py"


@pytest.fixture(scope="module")
def run(token_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    path = folder / "profile.json"
    unused = ["--train-samples", 640, "--save", folder / "saved", "--save-interval=1", "--load", folder / "saved"]
    words = ["--output", path, *command_line(token_data, EP2), *unused]
    results = launch.run(TOOL, words, 2, folder, timeout_s=150)
    launch.check(results)
    assert not (folder / "saved").exists()
    return read_profile(path), [result.output for result in results]


def test_profile_model_describes_the_model(run):
    profile, _ = run
    assert profile.model.layer_kinds == (LayerKind.MOE, LayerKind.MOE)
    assert (profile.model.ep_size, profile.model.world_size) == (2, 2)
    assert (profile.model.micro_batch_size, profile.model.seq_length, profile.model.num_micro_batches) == (4, 32, 2)
    assert "hidden=64" in profile.model.name
    assert {(op.chunk_dim, op.num_chunks) for op in profile.ops if op.kind == "experts"} == {
        (ChunkDim.BATCH, 1),
        *((dim, count) for dim in ChunkDim for count in (2, 4)),
    }
    assert {op.kind for op in profile.ops if op.dispatch is DEDUP} == {"preprocess", "experts", "postprocess"}


def test_profile_model_merges_times_of_all_ranks(run):
    profile, _ = run
    assert len(profile.received_share) == 2
    assert sum(profile.received_share) == pytest.approx(1)
    # A router that was just initialised sends neither of them all.
    assert min(profile.received_share) > 0.1
    assert len(profile.link.all_to_all) >= 2
    assert profile.link.all_reduce
    assert profile.link.counts_ms > 0


def test_profile_model_has_the_rows_of_both_dispatches(run):
    profile, _ = run
    assert {(chunk.chunk_dim, chunk.num_chunks) for chunk in profile.routing} == {
        (ChunkDim.BATCH, 1),
        *((dim, count) for dim in ChunkDim for count in (2, 4)),
    }
    assert profile.model.prob_bytes == 4
    for chunk in profile.routing:
        num_tokens = 4 * 32 // chunk.num_chunks
        assert sum(chunk.received) == 2 * 2 * num_tokens  # of both ranks, to two experts each
        # A token that goes to the other rank has one or both of its experts there.
        pairs = list(zip(chunk.sent, chunk.sent_tokens, strict=True))
        assert all(rows / 2 <= tokens <= min(rows, num_tokens) for rows, tokens in pairs)
        assert chunk.received_tokens == chunk.sent_tokens[::-1]
    whole = [chunk for chunk in profile.routing if chunk.num_chunks == 1]
    assert sum(sum(chunk.sent_tokens) for chunk in whole) < sum(sum(chunk.sent) for chunk in whole)


def test_profile_model_shows_progress_on_rank_0(run):
    _, outputs = run
    assert re.search(r"profile: 100%.*25/25", outputs[0])
    assert "profile written to" in outputs[0]
    assert "100%" not in outputs[1]


def test_profile_model_has_the_load_of_each_expert(run):
    load = run[0].expert_load
    assert [layer.layer for layer in load.layers] == [1, 2]
    assert load.num_steps == 18  # three traced steps of each of six plans
    for layer in load.layers:
        # Each rank's tokens of all micro-batches, to two experts each.
        assert [sum(of_source) for of_source in layer.rows] == [load.num_steps * 2 * 4 * 32 * 2] * 2
        assert len(set(layer.rows_per_expert)) > 1
