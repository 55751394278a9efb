"""Profiles are found by what they are of, and refused with the difference."""

import dataclasses

import pytest

from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.link_times import LinkTimes
from megatron_lancet.planning.profile import Profile, read_profile
from megatron_lancet.profiler import cache
from megatron_lancet.profiler.cache import ProfileKey
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import fixed_plan
from tests.unit.profiler.synthetic import FACTS

KEY = ProfileKey(FACTS, "a CPU", {"torch": "2.11"})
PROFILE = Profile(FACTS, KEY.device, KEY.versions, (), (), LinkTimes(((1024, 0.5),), 0.1), (), 3.0, (0.5, 0.5), {})


def with_model(**changes: object) -> ProfileKey:
    return dataclasses.replace(KEY, model=dataclasses.replace(FACTS, **changes))


def test_kept_profile_is_found_again(tmp_path):
    folder = tmp_path / "profiles"
    assert cache.load(folder, KEY) is None
    path = cache.keep(folder, PROFILE, ())
    assert read_profile(path) == PROFILE
    assert cache.load(folder, KEY) == PROFILE
    assert [file.name for file in folder.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "key",
    [
        with_model(name="another"),
        with_model(seq_length=11),
        with_model(world_size=4),
        with_model(token_multiple=16),
        with_model(nodes=Nodes(2, 1)),
        with_model(expert_tp_size=2),
        dataclasses.replace(KEY, device="a GPU"),
        dataclasses.replace(KEY, versions={"torch": "2.12"}),
        dataclasses.replace(KEY, plans=cache.names_of([fixed_plan(1)])),
    ],
)
def test_kept_profile_is_not_found_by_another_run(tmp_path, key):
    cache.keep(tmp_path, PROFILE, ())
    assert cache.load(tmp_path, key) is None


def test_bound_of_memory_is_not_part_of_the_profile_key(tmp_path):
    bounded = [str(dataclasses.replace(fixed_plan(chunks), dw_memory_bytes=1 << 20)) for chunks in (2, 1)]
    profile = dataclasses.replace(PROFILE, measured_steps_ms=dict.fromkeys(bounded, 1.0))
    cache.keep(tmp_path, profile, cache.names_of(bounded))
    key = dataclasses.replace(KEY, plans=cache.names_of([fixed_plan(1), fixed_plan(2)]))
    assert cache.load(tmp_path, key) == profile


def test_measured_fields_are_not_part_of_the_profile_key(tmp_path):
    cache.keep(tmp_path, PROFILE, ())
    assert cache.load(tmp_path, with_model(row_bytes=7, counts_bytes=9)) == PROFILE


def test_kept_profile_of_another_run_is_refused_field_by_field():
    other = dataclasses.replace(with_model(micro_batch_size=4, ep_size=4), device="a GPU", versions={"torch": "2.12"})
    with pytest.raises(RecordError) as refused:
        cache.check_fits(PROFILE, other, "mine.json")
    assert str(refused.value) == (
        "mine.json does not fit this run: micro_batch_size is 3 in the profile, 4 here; ep_size is 2 in the profile, 4 "
        "here; device is a CPU in the profile, a GPU here; version of torch is 2.11 in the profile, 2.12 here. "
        "Profile this run anew."
    )


def test_damaged_kept_profile_is_an_error(tmp_path):
    cache.keep(tmp_path, PROFILE, ()).write_text("{}")
    with pytest.raises(RecordError, match="version"):
        cache.load(tmp_path, KEY)


def test_failed_write_keeps_the_old_profile(tmp_path, monkeypatch):
    path = cache.keep(tmp_path, PROFILE, ())
    monkeypatch.setattr(Profile, "to_json", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.keep(tmp_path, PROFILE, ())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert cache.load(tmp_path, KEY) == PROFILE
