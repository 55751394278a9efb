"""A profile in the cache: what a run measures again, and when it takes a profile of its own."""

import re
from dataclasses import replace

import pytest

from megatron_lancet.features.tuning import plan_maker
from megatron_lancet.planning.load.expert_load import ExpertLoad, LayerLoad
from megatron_lancet.planning.profile import ChunkRouting
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.profiler.cache import ProfileKey
from megatron_lancet.schedule.plan import ChunkDim, plan_without_overlap
from tests.features.tuning.fake_profile_runs import (
    BATCH,
    PROFILE,
    Run,
    best,
    profiled,
    with_step,
)

pytestmark = pytest.mark.slow


def test_kept_profile_still_measures_links_and_shares(make, monkeypatch, tmp_path):
    first, _ = profiled(make(cache_dir=tmp_path / "cache"))
    rows = ((1,) * PROFILE.model.num_experts,) * PROFILE.model.ep_size
    now = replace(with_step(PROFILE), expert_load=ExpertLoad(1, 1, (LayerLoad(1, rows),)))
    monkeypatch.setattr(Run, "result", now)
    again = make(cache_dir=tmp_path / "cache")
    assert again.num_steps() == 3
    planned, num_steps = profiled(again)
    assert (best(planned), num_steps) == (best(first), 2)
    assert again.profile.expert_load == now.expert_load, "not the older run's"
    assert f"from the profile {tmp_path / 'cache' / 'profile-'}" in planned.why
    assert again.notes == []


def test_kept_profile_without_a_plan_of_the_run_is_not_used(make, tmp_path):
    profiled(make(cache_dir=tmp_path))
    wider = make(replace(BATCH, tiles=None), cache_dir=tmp_path)
    assert wider.num_steps() == 16
    assert profiled(wider)[1] == 4
    assert make(cache_dir=tmp_path).num_steps() == 3, "both are kept"


def routed(share, *chunk_counts):
    """The profile with this share of all rows on the first rank, in chunks of these counts as recorded."""
    rows = PROFILE.model.num_rows
    routing = tuple(
        ChunkRouting(
            layer,
            ChunkDim.BATCH,
            num_chunks,
            chunk,
            sent=tuple(round(rows * its / num_chunks) for its in (1 - share, share)),
            received=tuple(round(2 * rows * its / num_chunks) for its in (share, 1 - share)),
        )
        for layer in (1, 2)
        for num_chunks in chunk_counts
        for chunk in range(num_chunks)
    )
    return replace(PROFILE, received_share=(share, 1 - share), routing=routing)


def test_kept_profile_predicts_with_the_rows_of_the_run(make, monkeypatch, tmp_path):
    """The kept profile has even rows. The run measures uneven rows, of its present plan of four chunks."""
    monkeypatch.setattr(Run, "result", routed(0.5, 1, 2, 4))
    profiled(make(cache_dir=tmp_path))
    now = with_step(routed(0.75, 4))
    simulator = Simulator(CostModel(now))
    monkeypatch.setattr(Run, "result", now)
    maker = make(cache_dir=tmp_path)
    planned, num_steps = profiled(maker)
    assert (num_steps, maker.notes) == (2, [])
    assert planned.finalists[0].prediction == simulator.expected_step(best(planned))
    assert planned.no_overlap_ms == simulator.expected_step(plan_without_overlap()).step_ms
    # Ranks of large groups record no rows of chunks.
    monkeypatch.setattr(Run, "result", replace(now, routing=()))
    later = make(cache_dir=tmp_path)
    profiled(later)
    assert later.profile.routing == now.routing


def test_profile_without_a_refused_plan_is_found_again(make, tmp_path):
    maker = make(cache_dir=tmp_path)
    maker.begin(again=False)
    while (plan := maker.next_plan()) is not None:
        if plan.num_chunks == 4:
            maker.drop("no such kernel")
        else:
            maker.run_step(lambda: None)
    maker.make()
    later = make(cache_dir=tmp_path)
    assert later.num_steps() == 3
    assert later.notes == []


def test_kept_profile_of_another_network_is_said_and_mended(make, monkeypatch, tmp_path):
    profiled(make(cache_dir=tmp_path))
    slow = tuple((size, 3 * ms) for size, ms in PROFILE.link.all_to_all)
    changed = replace(PROFILE, link=replace(PROFILE.link, all_to_all=slow))
    monkeypatch.setattr(Run, "result", with_step(changed))
    maker = make(cache_dir=tmp_path)
    assert profiled(maker)[1] == 2
    (note,) = maker.notes
    assert re.search(r"^the links of the profile .* no longer fit: a message of .* MB took .* and takes ", note)
    assert maker.profile.link == changed.link
    later = make(cache_dir=tmp_path)
    profiled(later)
    assert later.notes == [], "the new links were kept"


@pytest.mark.parametrize(("share", "stages"), [(0.7, (0, 0)), (1.5, (0, 0)), (1.5, (0, 1))])
def test_kept_profile_of_another_speed_is_said_and_replaced(make, monkeypatch, tmp_path, share, stages):
    profile = replace(PROFILE, model=replace(PROFILE.model, stage_of_layer=stages))
    monkeypatch.setattr(Run, "result", profile)
    monkeypatch.setattr(plan_maker, "key_of", lambda model: ProfileKey.of(profile))
    profiled(make(cache_dir=tmp_path))
    monkeypatch.setattr(Run, "result", with_step(profile, share))
    maker = make(cache_dir=tmp_path)
    planned, num_steps = profiled(maker)
    assert num_steps == 2 + 3
    (note,) = maker.notes
    assert re.search(r"^the profile .* no longer fits: a step without overlap takes .*: measuring a new one$", note)
    assert "from a profile of 3 steps" in planned.why


def test_damaged_or_unwritable_profile_cache_is_one_line(make, tmp_path):
    folder = tmp_path / "cache"
    profiled(make(cache_dir=folder))
    next(folder.iterdir()).write_text("{")
    maker = make(cache_dir=folder)
    assert profiled(maker)[1] == 3
    assert [note.split(":")[0] for note in maker.notes] == ["the profile in the cache can't be used"]

    maker = make(cache_dir=next(folder.iterdir()) / "below-a-file")
    assert profiled(maker)[1] == 3
    (note,) = maker.notes
    assert note.startswith("the profile is not kept for later runs: ")
    assert note.endswith("--lancet-cache names another folder, or off")
