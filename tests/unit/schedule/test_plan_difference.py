import json

from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.plan_difference import plan_differences


def test_fields_and_who_has_what():
    plans = [Plan(num_chunks=k, dw_window=4).to_json() for k in (2, 2, 2, 4, 2, 1)]
    assert plan_differences(plans) == ["num_chunks is 2 on ranks 0-2, 4, 4 on rank 3, 1 on rank 5"]


def test_some_rank_has_no_plan():
    assert plan_differences(["null", Plan(num_chunks=2).to_json(), "null"]) == [
        "rank 1: overlap by a plan, ranks 0, 2: no plan"
    ]


def test_nested_fields_have_paths():
    plans = [{"layers": [{"window": 2}, {"window": 3}]}, {"layers": [{"window": 2}, {"window": 4, "split": True}]}]
    assert plan_differences([json.dumps(plan) for plan in plans]) == [
        "layers[1].window is 3 on rank 0, 4 on rank 1",
        "layers[1].split is absent on rank 0, True on rank 1",
    ]


def test_long_lists_end():
    plans = [json.dumps({"turns": [value] * 30}) for value in (0, 1)]
    differences = plan_differences(plans)
    assert len(differences) == 9
    assert differences[-1] == "22 more fields differ"


def test_equal_plans_do_not_differ():
    assert plan_differences([Plan(num_chunks=2).to_json()] * 3) == []
