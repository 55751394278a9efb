import dataclasses
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.plan_text.plan_text import head_lines
from megatron_lancet.planning.plan_file import (
    ExpectedStep,
    LayerExposure,
    PlanFile,
    Source,
    check_fits,
    made_for,
    misfits,
    read_plan_file,
    write_plan_file,
)
from megatron_lancet.planning.profile import ModelFacts
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Gap, OverlapRange, Plan, Segment, fixed_plan
from tests.damage import leaves, replaced
from tests.draws import examples


def facts(layers="dmmm", **changes) -> ModelFacts:
    """Of a made-up model on 4 ranks."""
    return dataclasses.replace(synthetic_profile(Machine(layers, shares=(0.25,) * 4)).model, **changes)


PLAN = Plan(
    (
        Segment(1, 2, 2, ChunkDim.SEQUENCE, OverlapRange.GATE),
        Segment(3, None, 4, ChunkDim.BATCH, OverlapRange.STACK),
    ),
    dw_window=4,
    dw_memory_bytes=1_000_000,
    gaps=(Gap("L3.c0.I.combine", ("L3.W.mlp.experts.linear_fc1",)),),
)
WHOLE = PlanFile(
    PLAN,
    made_for(facts()),
    ExpectedStep(100.5, 4.0, 10**9, 10**6, no_overlap_step_ms=120.0, layers=(LayerExposure(2, 4.0),)),
    Source("made up", "a laptop", {"torch": "2"}),
)


def write_json(path, value):
    path.write_text(json.dumps(value))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plan.json"


@pytest.mark.parametrize("content", [WHOLE, PlanFile(PLAN), PlanFile(fixed_plan(1, DwPolicy.NONE))])
def test_plan_file_is_read_as_written(path, content):
    write_plan_file(path, content)
    assert read_plan_file(path) == content
    assert list(path.parent.iterdir()) == [path]


def test_failed_write_of_a_plan_file_leaves_no_file(tmp_path):
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(OSError, match=r"plan\.json"):
        write_plan_file(tmp_path / "plan.json", WHOLE)
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_plan_file_by_hand_needs_only_a_plan(path):
    by_hand = {
        "version": 1,
        "plan": {"version": 3, "segments": [{"first_layer": 1, "last_layer": None, "num_chunks": 2}], "dw_window": 4},
    }
    assert read_plan_file(write_json(path, by_hand)) == PlanFile(fixed_plan(2))


@examples(60)
@given(st.integers(0, len(WHOLE.to_json()) - 3))
def test_truncated_plan_file_is_refused_by_name(length):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(WHOLE.to_json()[:length])
        with pytest.raises(RecordError, match=r"plan\.json: no JSON, or damaged"):
            read_plan_file(path)


PLAIN = json.loads(WHOLE.to_json())


@given(st.sampled_from(leaves(PLAIN)), st.sampled_from([{}, [], ["x"], -7, 10**400, True, float("nan"), "\ud800"]))
def test_wrong_types_and_values_in_a_plan_file_are_record_errors(place, wild):
    """Some places take a wild value: a text any text, a number 10**400 not even that."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_json(Path(folder) / "plan.json", replaced(PLAIN, place, wild))
        refused, read = None, None
        try:
            read = read_plan_file(path)
        except RecordError as error:
            refused = str(error)
        if read is None:
            assert "plan.json" in refused
            assert "\n" not in refused
        else:
            assert json.loads(read.to_json()) == replaced(PLAIN, place, wild)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"version": 99}, "expected version 1 of the plan file's format, found 99"),
        ({"version": True}, "expected version 1 .* found True"),
        ({"plan": {**PLAIN["plan"], "version": 2}}, r"json\.plan: expected version 3 of the plan's format, found 2"),
        ({"plan": {**PLAIN["plan"], "speed": 2}}, r"json\.plan: unknown field 'speed'"),
        ({"plan": {**PLAIN["plan"], "segments": []}}, "at least one segment"),
        ({"plan": None}, r"json\.plan: expected an object, found None"),
        ({"author": "me"}, "unknown field 'author'; known: plan, made_for, prediction, source"),
        (
            {"made_for": {**PLAIN["made_for"], "num_layers": 2, "moe_layers": "2"}},
            "contradicts its made_for: .* layers 3-end of 2",
        ),
        ({"made_for": {**PLAIN["made_for"], "moe_layers": "2-9"}}, "moe_layers 2-9 are not all among the 4 layers"),
        ({"made_for": {**PLAIN["made_for"], "moe_layers": "many"}}, "expected numbers such as '1, 3-40', found 'many'"),
        ({"segments": []}, "this is a bare plan"),
        ({"ops": [], "weight_grads": []}, "this is a profile; lancet plan make makes a plan of it"),
    ],
)
def test_damage_of_a_plan_file_is_named(path, damage, message):
    with pytest.raises(RecordError, match=message):
        read_plan_file(write_json(path, {**PLAIN, **damage}))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000, b"7", b""])
def test_plan_file_without_a_json_object_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"plan\.json: (no JSON, or damaged|expected an object)"):
        read_plan_file(path)


def test_missing_plan_file_and_folder_are_refused(tmp_path):
    with pytest.raises(RecordError, match=r"nothing\.json: can't be read: No such file"):
        read_plan_file(tmp_path / "nothing.json")
    with pytest.raises(RecordError, match="can't be read: Is a directory"):
        read_plan_file(tmp_path)


def test_plan_file_for_another_model_is_refused_field_by_field():
    check_fits(WHOLE, made_for(facts()), "plan.json")
    foreign = made_for(facts("mmmm", ep_size=2, topk=2))
    assert misfits(WHOLE, foreign) == [
        "moe_layers is 2-4 in the plan file, 1-4 in the run",
        "topk is 1 in the plan file, 2 in the run",
        "ep_size is 4 in the plan file, 2 in the run",
    ]
    with pytest.raises(RecordError, match=r"plan\.json was made for another model or layout: moe_layers is 2-4"):
        check_fits(WHOLE, foreign, "plan.json")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(made_for(facts()))])
def test_every_field_of_made_for_is_compared(field):
    ours = made_for(facts())
    texts = {"moe_layers": "1-3", "pattern": "*E*E"}
    other = dataclasses.replace(ours, **{field: texts.get(field) or getattr(ours, field) + 1})
    assert len(misfits(WHOLE, other)) == 1


def test_plan_file_names_the_layers_of_a_hybrid_model():
    model = made_for(facts("*E-E"))
    assert (model.moe_layers, model.pattern) == ("2, 4", "*E-E")
    assert next(head_lines(PlanFile(PLAN, model))).startswith("made for: 4 layers *E-E (MoE: 2, 4) on 1 pipeline stage")


def test_plan_file_without_made_for_must_fit_the_layers():
    fits_all = PlanFile(PLAN)
    assert misfits(fits_all, made_for(facts("m" * 40))) == []
    assert misfits(fits_all, made_for(facts("mm"))) == ["its last segment is layers 3-end of 2"]
    short = PlanFile(Plan((Segment(1, 2, 1),), dw_window=2))
    assert misfits(short, made_for(facts())) == ["it says nothing of layers 3-4"]
