"""The text in a checkpoint: it comes back whole, and says what it does not fit."""

import json

import pytest

from megatron_lancet.features.tuning.tuned_plan import TunedPlan
from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.schedule.plan import DwPolicy, fixed_plan, paired
from megatron_lancet.training.observe.step_stats import StepStats

STATS = StepStats(100.0, 1.0, 10.0, 0.5, 40.0, 5)
TUNED = TunedPlan(fixed_plan(2), {"ep_size": "2", "device": "cpu"}, STATS, STATS, StepEstimate(99.0, 9.5, 10**9, 10**6))


PAIRED = paired(fixed_plan(1, DwPolicy.NONE), fixed_plan(2, DwPolicy.NONE))


@pytest.mark.parametrize("tuned", [TUNED, TunedPlan(fixed_plan(4), {}, STATS), TunedPlan(PAIRED, {}, STATS)])
def test_tuned_plan_is_read_as_saved(tuned):
    assert TunedPlan.from_json(tuned.to_json(), "checkpoint") == tuned


def test_damage_of_a_tuned_plan_is_named():
    value = json.loads(TUNED.to_json())
    damaged = {
        r"expected version 2\.\d+ .* found 9": json.dumps({**value, "version": 9}),
        "expected an object, found list": "[]",
        "found None": "{}",
        "no JSON": TUNED.to_json()[:-1],
        r"checkpoint\.chosen\.step_ms": json.dumps({**value, "chosen": {**value["chosen"], "step_ms": "fast"}}),
        "num_chunks must be at least 1": TUNED.to_json().replace('"num_chunks": 2', '"num_chunks": 0'),
    }
    for message, text in damaged.items():
        with pytest.raises(RecordError, match=message):
            TunedPlan.from_json(text, "checkpoint")


def test_tuned_plan_names_what_it_does_not_fit():
    assert TUNED.misfit({"device": "cpu", "ep_size": "2"}) is None
    assert TUNED.misfit({"device": "x" * 100, "ep_size": "4"}) == (
        f"ep_size was 2, is 4; device was cpu, is {'x' * 57}..."
    )
    assert TUNED.misfit({"ep_size": "2"}) == "device was cpu, is not known"
    many = {str(number): "new" for number in range(8)}
    assert TUNED.misfit({**TUNED.made_for, **many}).endswith("; 4 more")
