"""A profile in the cache: what a run measures again, and when it takes a profile of its own."""

import re
from dataclasses import replace

import pytest

from megatron_lancet.features.tuning import plan_maker
from megatron_lancet.profiler.cache import ProfileKey
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
    monkeypatch.setattr(Run, "result", with_step(PROFILE))
    again = make(cache_dir=tmp_path / "cache")
    assert again.num_steps() == 3
    planned, num_steps = profiled(again)
    assert (best(planned), num_steps) == (best(first), 2)
    assert f"from the profile {tmp_path / 'cache' / 'profile-'}" in planned.why
    assert again.notes == []


def test_kept_profile_without_a_plan_of_the_run_is_not_used(make, tmp_path):
    profiled(make(cache_dir=tmp_path))
    wider = make(replace(BATCH, tiles=None), cache_dir=tmp_path)
    assert wider.num_steps() == 16
    assert profiled(wider)[1] == 4
    assert make(cache_dir=tmp_path).num_steps() == 3, "both are kept"


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
