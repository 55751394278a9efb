"""One model that changes its plan from step to step, next to a stock one on the same weights."""

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, Segment, fixed_plan
from tests.features.dedup import cases as dedup
from tests.features.tiles import cases as tiles
from tests.parity.gradients.disturbances import erratic_wire
from tests.parity.gradients.gradients_worker import (
    build,
    close,
    gradients,
    logged_losses,
    overlapping_model,
    step,
    wrap_with_ddp,
)
from tests.parity.gradients.observer import Observer
from tests.parity.gradients.variants import GAPS, MLA

PLANS: dict[str, Plan] = {
    "batch": fixed_plan(2),
    "whole-none": fixed_plan(1, DwPolicy.NONE),
    "sequence": fixed_plan(3, chunk_dim=ChunkDim.SEQUENCE),
    "whole": fixed_plan(1),
    "segments": Plan(
        (
            Segment(1, 1, 3, ChunkDim.SEQUENCE),
            Segment(2, 3, 2, ChunkDim.BATCH, OverlapRange.EXPERTS),
        ),
        dw_window=6,
        gaps=GAPS,
    ),
    "bounded": fixed_plan(4, dw_memory_bytes=20_000),
    "sequence-none": fixed_plan(2, DwPolicy.NONE, ChunkDim.SEQUENCE),
}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
CASES: dict[str, tuple[dict[str, Any], bool, dict[str, Plan]]] = {
    "switching/overlapping-reduce": ({"num_moe_experts": 8}, True, PLANS),
    "switching/recompute-overlapping-reduce": (RECOMPUTE, True, PLANS),
    "switching/mla-reduce-at-the-end": (MLA, False, PLANS),
    "switching/tiles-overlapping-reduce": ({"num_moe_experts": 8}, True, tiles.SWITCHED),
    "switching/dedup-overlapping-reduce": ({"num_moe_experts": 8}, True, dedup.SWITCHED),
}
"""Overrides of the config, whether reductions overlap with the backward pass, and plans."""


def switching_cases() -> dict[str, list[dict[str, Any]]]:
    return {name: switch_through_plans(*case) for name, case in CASES.items()}


def switch_through_plans(
    overrides: dict[str, Any],
    overlaps: bool,
    plans: Mapping[str, Plan],
    run_step: Callable[[Any], list[float]] = step,
    nodes: Nodes | None = None,
) -> list[dict[str, Any]]:
    """A step under each plan in turn, and the same step of stock; then the weights move on.

    The first plan comes twice: only from DDP's second step on do reductions start as soon as gradients become ready.

    Args:
        run_step: runs a step of a model that DDP has wrapped; returns its losses.
        nodes: how expert-parallel groups lie on nodes, for plans with two hops.
    """
    first, *others = plans
    stock_model, config, precision = build(overrides)
    our_model, our_config, _ = build(overrides)
    setup, stats = overlapping_model(our_model, plans[first], switchable=True, nodes=nodes)
    stock = wrap_with_ddp(stock_model, config, precision, False, overlaps)
    ours = wrap_with_ddp(our_model, our_config, precision, setup.delays_weight_grads, overlaps)
    results = []
    for plan_name in (first, first, *others, first):
        our_model.load_state_dict(copy.deepcopy(stock_model.state_dict()))
        expected = run_step(stock), gradients(stock_model), logged_losses()
        setup.switch(plans[plan_name])
        found = observed_step(ours, run_step)
        logged = logged_losses()
        times = stats.take()
        results.append(
            {
                "plan": plan_name,
                "loss": relative_difference(found.pop("losses"), expected[0]),
                "gradients": relative_errors(gradients(our_model), expected[1]),
                "logged": max(relative_difference(logged[name], expected[2][name]) for name in expected[2]),
                "num_deferred": times.num_dw_in_gaps + times.num_dw_early + times.num_dw_late,
                "position": setup.position,
                **found,
            }
        )
        with torch.no_grad():
            for parameter in stock_model.parameters():
                parameter.sub_(0.05 * parameter.main_grad)
    close(stats)
    return results


def observed_step(ours, run_step: Callable[[Any], list[float]]) -> dict[str, Any]:
    from megatron_lancet.model.local_experts import grouped_linear

    with ExitStack() as stack:
        erratic_wire(stack)
        grouped = stack.enter_context(
            mock.patch.object(grouped_linear, "multiply_one_by_one", wraps=grouped_linear.multiply_one_by_one)
        )
        observer = Observer(stack, ours)
        losses = run_step(ours)
    return {
        "losses": losses,
        "grouped_layers": grouped.call_count,
        "collectives": observer.collectives,
        "reports": dict(observer.reports),
    }
