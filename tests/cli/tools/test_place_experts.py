"""The placing tool from end to end, and what it refuses."""

import dataclasses

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.errors import UsageError
from megatron_lancet.planning.load.expert_load import ExpertLoad, LayerLoad
from megatron_lancet.planning.load.placement import read_placement
from tests.cli.loading import load_tool

LOAD = ExpertLoad(5, 2, (LayerLoad(1, ((8, 6, 1, 1),) * 2), LayerLoad(2, ((3, 3, 3, 3),) * 2)))


@pytest.fixture
def run(capsys):
    module = load_tool("plans/place_experts")

    def run(*argv):
        module.main([str(word) for word in argv])
        return capsys.readouterr().out

    return run


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "load.json"
    path.write_text(LOAD.to_json())
    return path


def test_place_experts_writes_a_placement_and_shows_its_effect(run, load, tmp_path):
    output = tmp_path / "placement.json"
    lines = run(load, "--output", output).splitlines()
    assert lines[0].split() == ["layer", "most/mean", "before", "after", "experts", "moved"]
    assert lines[1].split() == ["1", "1.75", "1.12", "2"]
    assert lines[2].split() == ["2", "1.00", "1.00", "0"]
    placements = read_placement(output)
    assert placements[2] == (0, 1, 2, 3)
    assert {frozenset(placements[1][:2]), frozenset(placements[1][2:])} in (
        {frozenset({0, 2}), frozenset({1, 3})},
        {frozenset({0, 3}), frozenset({1, 2})},
    )


def test_place_experts_shows_rows_between_nodes_of_a_profile(run, tmp_path):
    profile = synthetic_profile(Machine())
    rows = tuple(range(profile.model.num_experts, 0, -1))
    load = ExpertLoad(3, 2, (LayerLoad(1, (rows,) * profile.model.ep_size),))
    path = tmp_path / "profile.json"
    path.write_text(dataclasses.replace(profile, expert_load=load).to_json())
    assert "% of rows between nodes before" in run(path, "--ranks-per-node", 1)
    path.write_text(profile.to_json())
    with pytest.raises(UsageError, match=r"has no load of experts.*Profile the model again"):
        run(path)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--ep-size", 3), "no placement: 4 experts can't be spread evenly over 3 ranks. Change --ep-size"),
        (("--output", "/nowhere/placement.json"), "output folder /nowhere does not exist"),
    ],
)
def test_place_experts_refuses_in_one_line(run, load, options, problem):
    with pytest.raises(UsageError, match=problem) as raised:
        run(load, *options)
    assert "\n" not in str(raised.value)


def test_place_experts_refuses_a_damaged_file(run, tmp_path):
    path = tmp_path / "load.json"
    path.write_text("{}")
    with pytest.raises(UsageError, match=r"no usable load of experts: .*expected version 1"):
        run(path)
