import json

from megatron_lancet.planning.plan_difference import plan_differences
from megatron_lancet.schedule.plan import DwPolicy, Gap, Plan, Segment, fixed_plan


def test_plan_difference_lists_fields_and_ranks():
    plans = [fixed_plan(k, DwPolicy.NONE).to_json() for k in (2, 2, 2, 4, 2, 1)]
    assert plan_differences(plans) == ["segments[0].num_chunks is 2 on ranks 0-2, 4, 4 on rank 3, 1 on rank 5"]


def test_plan_difference_of_different_segments():
    one = Plan((Segment(1, None, 2),), dw_window=4)
    two = Plan((Segment(1, 3, 2), Segment(4, None, 2)), dw_window=4)
    differences = plan_differences([one.to_json(), two.to_json()])
    assert differences[:2] == [
        "segments[0].last_layer is None on rank 0, 3 on rank 1",
        "segments[1].first_layer is absent on rank 0, 4 on rank 1",
    ]
    assert len(differences) == 6


def test_plan_difference_of_planned_gaps():
    plans = [
        Plan((Segment(1, None, 2),), dw_window=4, gaps=(Gap("L1.c0.I.combine", (name,)),)).to_json()
        for name in ("L1.W.linear_fc1", "L1.W.linear_fc2")
    ]
    assert plan_differences(plans) == [
        "gaps[0].weight_grads[0] is L1.W.linear_fc1 on rank 0, L1.W.linear_fc2 on rank 1"
    ]


def test_plan_difference_of_a_rank_without_plan():
    assert plan_differences(["null", fixed_plan(2).to_json(), "null"]) == [
        "rank 1: overlap by a plan, ranks 0, 2: no plan"
    ]


def test_plan_difference_has_paths_of_nested_fields():
    plans = [{"layers": [{"window": 2}, {"window": 3}]}, {"layers": [{"window": 2}, {"window": 4, "split": True}]}]
    assert plan_differences([json.dumps(plan) for plan in plans]) == [
        "layers[1].window is 3 on rank 0, 4 on rank 1",
        "layers[1].split is absent on rank 0, True on rank 1",
    ]


def test_plan_difference_shortens_long_lists():
    plans = [json.dumps({"turns": [value] * 30}) for value in (0, 1)]
    differences = plan_differences(plans)
    assert len(differences) == 9
    assert differences[-1] == "22 more fields differ"


def test_plan_difference_of_equal_plans_is_empty():
    assert plan_differences([fixed_plan(2).to_json()] * 3) == []
