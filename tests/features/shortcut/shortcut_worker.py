"""Megatron's own modules and ours, wired alike, side by side: every parameter's gradient, every report to DDP."""

import argparse
import copy
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.features.shortcut.feature import SHORTCUT, ActiveShortcut
from tests.features.case import LAYOUTS, Case
from tests.features.shortcut import cases
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.disturbances import detached_experts, erratic_wire
from tests.parity.gradients.gradients_worker import (
    build,
    deferred_weights,
    gradients,
    largest,
    logged_losses,
    micro_batches,
    trained,
    wrap_with_ddp,
)
from tests.parity.gradients.observer import Observer
from tests.parity.gradients.placed import place
from tests.parity.paired.paired_worker import step

NUM_MICRO_BATCHES = (1, 3)
"""Of the two steps of a comparison."""
_STOCK: dict[str, Any] = {}


def stock_run(
    overrides: dict[str, Any], is_wired: bool = True
) -> tuple[dict[str, Any], list[Any], dict[str, Any], Any]:
    """Weights, steps, logged losses and evaluation of Megatron's modules; run once for all plans of a model."""
    key = repr((overrides, is_wired))
    if key not in _STOCK:
        overrides = dict(overrides)
        number = overrides.pop(cases.IDENTITY, 0)
        model, config, precision = build(overrides)
        if is_wired:
            ActiveShortcut(number).prepare_stock([model])
        weights = copy.deepcopy(model.state_dict())
        shards = overrides.get("distributed_optimizer", False)
        stock = wrap_with_ddp(model, config, precision, deferred=False, distributed_optimizer=shards)
        steps = [(step(stock, num), gradients(model)) for num in NUM_MICRO_BATCHES]
        _STOCK[key] = weights, steps, logged_losses(), evaluated(stock)
    return _STOCK[key]


def evaluated(ddp: Any) -> torch.Tensor:
    """The losses of tokens in an evaluation."""
    ddp.eval()
    with torch.no_grad():
        losses = ddp(**{"attention_mask": None, **next(micro_batches(1))})
    ddp.train()
    logged_losses()
    return losses.float()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest one, relative to the largest value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def ours(overrides: dict[str, Any], weights: dict[str, Any], case: Case) -> tuple[Any, Any, Any]:
    """Our model with these weights: the model, its setup and its DDP."""
    from megatron_lancet.features.row_bound.feature import limit_rows
    from megatron_lancet.runtime.comm_stats import CommStats
    from megatron_lancet.training.overlap_setup import OverlapSetup

    overrides = dict(overrides)
    number = overrides.pop(cases.IDENTITY, 0)
    model, config, precision = build(overrides)
    cpu = torch.device("cpu")
    sdpa = config.context_parallel_size > 1
    setup = OverlapSetup(case.plan, cpu, CommStats(cpu), timedelta(minutes=2), sdpa, features=[ActiveShortcut(number)])
    setup([model])
    model.load_state_dict(copy.deepcopy(weights))
    limit_rows(setup, case.max_rows)
    place(model, case.moves_weights)
    shards = overrides.get("distributed_optimizer", False)
    return model, setup, wrap_with_ddp(model, config, precision, setup.delays_weight_grads, True, shards)


def difference_of_built(overrides: dict[str, Any]) -> float:
    """Of a model that is evaluated outside of a run, from the trained one: weights by name, settings from arguments."""
    weights, _, _, expected = stock_run(overrides)
    overrides = dict(overrides)
    number = overrides.pop(cases.IDENTITY)
    model, config, precision = build(overrides)
    SHORTCUT.prepare_built(argparse.Namespace(lancet_shortcut_moe=True, lancet_identity_experts=number), model)
    model.load_state_dict(weights)
    return difference(evaluated(precision(config, model)), expected)


def compare(case: Case, config: dict[str, Any], disturb: Callable[[ExitStack], None] | None = None) -> dict[str, Any]:
    """Two steps of both on the same weights and data; how far they are apart.

    Args:
        config: sizes of the layout.
        disturb: a negative control.
    """
    from megatron_lancet.features.pairing.schedules import paired_schedules

    overrides = {**config, **case.overrides}
    weights, stock, stock_logged, stock_evaluated = stock_run(overrides)
    model, setup, ddp = ours(overrides, weights, case)
    with ExitStack() as stack:
        stack.enter_context(paired_schedules(lambda: setup.stages))
        if case.disturbed:
            erratic_wire(stack)
        if disturb is not None:
            disturb(stack)
        first, second = NUM_MICRO_BATCHES
        results = [(step(ddp, first), gradients(model))]
        observer = Observer(stack, ddp)
        results.append((step(ddp, second), gradients(model)))
    setup.check_step(lambda: None)
    logged = logged_losses()
    pairs = list(zip(results, stock, strict=True))
    return {
        "loss": max(relative_difference(a[0], b[0]) for a, b in pairs),
        "gradients": largest([relative_errors(a[1], b[1]) for a, b in pairs]),
        "zero_gradients": [name for name, gradient in results[1][1].items() if not gradient.any()],
        "logged": max((relative_difference(logged[name], stock_logged[name]) for name in stock_logged), default=0.0),
        "logged_names_equal": logged.keys() == stock_logged.keys(),
        "state_keys_equal": list(model.state_dict()) == list(weights),
        "keeps_input": any(getattr(layer.mlp, "_own_sbH", None) is not None for layer in model.decoder.layers),
        "evaluation": difference(evaluated(ddp), stock_evaluated),
        "collectives": observer.collectives,
        "reports": dict(observer.reports),
        "reports_of_deferred": [weight.num_reported for weight in deferred_weights(model)],
        "parameters": list(trained(model)),
    }


def on_two_ranks() -> dict[str, Any]:
    """What is found for each case, by its name."""
    with parallel({"expert_model_parallel_size": 2}) as config:
        results = {name: compare(case, config) for name, case in cases.CASES.items()}
        overrides = {**config, **cases.MODEL}
        results["built"] = {"evaluation": difference_of_built({**overrides, cases.IDENTITY: 3})}
        results["detached-experts"] = compare(cases.CASES["plain/k=1"], config, detached_experts)
        (_, steps, _, evaluation), (_, unwired, _, of_unwired) = stock_run(overrides), stock_run(overrides, False)
        results["unwired"] = {
            "loss": relative_difference(unwired[0][0], steps[0][0]),
            "evaluation": difference(of_unwired, evaluation),
        }
    return results


def on_four_ranks() -> dict[str, Any]:
    """The same in layouts of four ranks."""
    from megatron_lancet.training.megatron.patches import sequence_parallel_with_torch_norm

    results: dict[str, Any] = {}
    with sequence_parallel_with_torch_norm():
        for layout in dict.fromkeys(case.layout for case in cases.IN_LAYOUTS.values()):
            assert layout is not None
            with parallel(LAYOUTS[layout]) as config:
                chosen = {name: case for name, case in cases.IN_LAYOUTS.items() if case.layout == layout}
                results |= {name: compare(case, config) for name, case in chosen.items()}
    return results
