"""Where deduplicated dispatch can be used."""

import dataclasses

import pytest

from megatron_lancet.planning.dispatch import is_evident, why_not_dedup, with_dispatch
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import Dispatch, DwPolicy, Gap, fixed_plan, paired


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ((1, 8, 4, False), "one expert-parallel rank"),
        ((2, 8, 1, False), "top-1"),
        ((8, 8, 2, False), "a rank has one expert"),
        ((2, 8, 4, True), "padded to capacity"),
        ((2, 0, 0, False), "no experts"),
        ((2, 8, 4, False), None),
        ((4, 8, 2, False), None),
    ],
)
def test_says_why_a_layout_has_nothing_to_deduplicate(layout: tuple[int, int, int, bool], reason: str | None) -> None:
    why_not = why_not_dedup(*layout)
    assert why_not is None if reason is None else why_not is not None and reason in why_not


def test_plan_with_another_dispatch_defers_over_as_many_layers() -> None:
    plan = fixed_plan(2)
    hops = with_dispatch(plan, Dispatch.TWO_HOP)
    assert hops == fixed_plan(2, dispatch=Dispatch.TWO_HOP)
    assert hops.dw_window == 2 * plan.dw_window
    assert with_dispatch(hops, Dispatch.PLAIN) == plan
    assert with_dispatch(fixed_plan(1, DwPolicy.NONE), Dispatch.TWO_HOP).dw_window == 0
    pairs = with_dispatch(paired(plan, fixed_plan(1)), Dispatch.TWO_HOP)
    assert pairs.at_ends == fixed_plan(1, dispatch=Dispatch.TWO_HOP)


def test_another_dispatch_keeps_gaps_of_messages_between_nodes() -> None:
    grads = ("L1.W.mlp.experts",)
    plan = dataclasses.replace(fixed_plan(1), gaps=(Gap("L1.c0.I.combine", grads), Gap("L1.c0.I.dispatch", grads)))
    hops = with_dispatch(plan, Dispatch.TWO_HOP)
    assert [gap.op for gap in hops.gaps] == ["L1.c0.I.node_combine", "L1.c0.I.node_dispatch"]
    more = dataclasses.replace(hops, gaps=(*hops.gaps, Gap("L1.c0.I.local_combine", grads)))
    assert with_dispatch(more, Dispatch.PLAIN) == plan
    assert with_dispatch(plan, Dispatch.DEDUP).gaps == plan.gaps


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ((Dispatch.TWO_HOP, None, 4, 8, 2), True),
        ((Dispatch.TWO_HOP, Nodes(2, 2), 4, 8, 1), True),
        ((Dispatch.TWO_HOP, Nodes(2, 2), 4, 8, 2), False),
        ((Dispatch.DEDUP, None, 4, 8, 2), False),
        ((Dispatch.DEDUP, None, 1, 8, 2), True),
        ((Dispatch.PLAIN, None, 1, 8, 1), False),
    ],
)
def test_reasons_that_a_layout_shows_are_evident(
    layout: tuple[Dispatch, Nodes | None, int, int, int], expected: bool
) -> None:
    assert is_evident(*layout) is expected
