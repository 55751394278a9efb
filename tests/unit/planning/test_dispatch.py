"""Where deduplicated dispatch can be used."""

import dataclasses

import pytest

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.planning.dispatch import with_dispatch
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.layout import Layout
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import DwPolicy, Gap, fixed_plan, paired


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
    blocker = DEDUP.blocker(Layout(*layout))
    assert blocker is None if reason is None else blocker is not None and reason in blocker.reason


def test_plan_with_another_dispatch_defers_over_as_many_layers() -> None:
    plan = fixed_plan(2)
    hops = with_dispatch(plan, TWO_HOP)
    assert hops == fixed_plan(2, dispatch=TWO_HOP)
    assert hops.dw_window == 2 * plan.dw_window
    assert with_dispatch(hops, PLAIN) == plan
    assert with_dispatch(fixed_plan(1, DwPolicy.NONE), TWO_HOP).dw_window == 0
    pairs = with_dispatch(paired(plan, fixed_plan(1)), TWO_HOP)
    assert pairs.at_ends == fixed_plan(1, dispatch=TWO_HOP)


def test_another_dispatch_keeps_gaps_of_messages_between_nodes() -> None:
    grads = ("L1.W.mlp.experts",)
    plan = dataclasses.replace(fixed_plan(1), gaps=(Gap("L1.c0.I.combine", grads), Gap("L1.c0.I.dispatch", grads)))
    hops = with_dispatch(plan, TWO_HOP)
    assert [gap.op for gap in hops.gaps] == ["L1.c0.I.node_combine", "L1.c0.I.node_dispatch"]
    more = dataclasses.replace(hops, gaps=(*hops.gaps, Gap("L1.c0.I.local_combine", grads)))
    assert with_dispatch(more, PLAIN) == plan
    assert with_dispatch(plan, DEDUP).gaps == plan.gaps


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ((TWO_HOP, None, 4, 8, 2), True),
        ((TWO_HOP, Nodes(2, 2), 4, 8, 1), True),
        ((TWO_HOP, Nodes(2, 2), 4, 8, 2), False),
        ((DEDUP, None, 4, 8, 2), False),
        ((DEDUP, None, 1, 8, 2), True),
        ((PLAIN, None, 1, 8, 1), False),
    ],
)
def test_reasons_that_a_layout_shows_are_evident(
    layout: tuple[Dispatch, Nodes | None, int, int, int], expected: bool
) -> None:
    dispatch, nodes, *numbers = layout
    blocker = dispatch.blocker(Layout(*numbers, nodes=nodes))
    assert (blocker is not None and blocker.is_evident) is expected
