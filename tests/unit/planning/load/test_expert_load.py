"""Measured load of experts: its file, its place in a profile, and the sum of windows."""

import dataclasses
import json

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.what_if.layout import Layout, in_layout
from megatron_lancet.lab.what_if.routing import even_share
from megatron_lancet.planning.load.expert_load import ExpertLoad, LayerLoad, read_expert_load
from megatron_lancet.planning.profile import profile_from_json

LOAD = ExpertLoad(10, 3, (LayerLoad(2, ((1, 2, 3, 4), (5, 6, 7, 8))), LayerLoad(3, ((0, 0, 9, 0), (1, 1, 1, 1)))))


def test_a_load_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "load.json"
    path.write_text(LOAD.to_json())
    assert read_expert_load(path) == LOAD
    assert len(LOAD.to_json().splitlines()) == 2 + len(LOAD.layers)


def test_rows_of_an_expert_come_from_all_ranks():
    assert LOAD.layers[0].rows_per_expert == (6, 8, 10, 12)
    assert (LOAD.ep_size, LOAD.num_experts) == (2, 4)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "expected version 1 of the expert load's format, found 2"),
        ({"num_steps": 0}, r"num_steps: expected 1 to \d+, found 0"),
        ({"layers": [{"layer": 1, "rows": [[1, 2], [3]]}]}, "equally many experts"),
        ({"layers": [{"layer": 2, "rows": [[1, -2]]}]}, r"rows\[0\]\[1\]: expected 0 to \d+, found -2"),
        ({"layers": [{"layer": 2, "rows": [[1]]}, {"layer": 2, "rows": [[1]]}]}, "layers must be in order, each once"),
        ({"layers": [{"layer": 1, "rows": [[1]]}, {"layer": 2, "rows": [[1, 2]]}]}, "the same numbers of ranks"),
    ],
)
def test_a_damaged_load_is_refused_in_one_line(tmp_path, change, problem):
    path = tmp_path / "load.json"
    path.write_text(json.dumps({**json.loads(LOAD.to_json()), **change}))
    with pytest.raises(RecordError, match=problem) as raised:
        read_expert_load(path)
    assert "\n" not in str(raised.value)


def test_a_profile_keeps_the_load_where_there_is_one():
    profile = synthetic_profile(Machine())
    assert profile_from_json(profile.to_json(), "p.json").expert_load is None
    num_experts = profile.model.num_experts
    load = ExpertLoad(3, 2, (LayerLoad(1, ((7,) * num_experts,) * profile.model.ep_size),))
    with_load = dataclasses.replace(profile, expert_load=load)
    assert profile_from_json(with_load.to_json(), "p.json") == with_load


def test_a_profile_refuses_the_load_of_another_layout():
    load = ExpertLoad(3, 2, (LayerLoad(1, ((7, 7),)),))
    with pytest.raises(ValueError, match="expert_load must have rows of 2 ranks"):
        dataclasses.replace(synthetic_profile(Machine()), expert_load=load)


@pytest.mark.parametrize("ep_size", [2, 4])
def test_a_load_stays_in_its_layout(ep_size):
    """Rows of ranks that the other layout lacks say nothing about it."""
    profile = synthetic_profile(Machine())
    load = ExpertLoad(3, 2, (LayerLoad(1, ((7,) * profile.model.num_experts,) * profile.model.ep_size),))
    layout = Layout(ep_size, ep_size, 1, 2, None, even_share(ep_size))
    elsewhere = in_layout(dataclasses.replace(profile, expert_load=load), layout)
    assert elsewhere.expert_load == (load if ep_size == profile.model.ep_size else None)
