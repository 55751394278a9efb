"""A small model on any device next to stock on the same weights and data: two steps of each under Megatron's DDP."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.features.pairing.schedules import paired_schedules
from megatron_lancet.runtime.comm_stats import CommStats, CommTimes
from megatron_lancet.runtime.trace import StepTrace, Trace
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.overlap_setup import OverlapSetup
from tests.parity.gradients.gradients_worker import (
    NUM_MICRO_BATCHES,
    build,
    deferred_weights,
    gradients,
    logged_losses,
    micro_batches,
    wrap_with_ddp,
)
from tests.virtual_gpu.paired import scheduled_step

SETTINGS = {"num_layers": 2, "num_moe_experts": 8, "masked_softmax_fusion": False}
TOLERANCE = 1e-4
"""Of a gradient's norm in fp32. Chunks change the order of sums, and on a device atomic additions change stock's."""

type Watch = Callable[[], AbstractContextManager[None]]


@dataclass
class Comparison:
    """What two steps of ours have given; in DDP's second one reductions start as gradients become ready.

    Attributes:
        loss: relative difference to stock's, the largest.
        gradients: relative error of each parameter's gradient against stock's, the largest of the steps.
        fp32_errors: in bf16 errors of the last step's gradients against stock's in fp32: stock's, and ours.
        num_reports: reports of each deferred weight to DDP.
        times: communication of the last step.
        trace: the last step's.
    """

    loss: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    fp32_errors: tuple[dict[str, float], dict[str, float]] | None = None
    num_reports: list[int] = field(default_factory=list)
    times: CommTimes | None = None
    trace: StepTrace | None = None


def compare(plans: Sequence[Plan], overrides: dict[str, Any], device: torch.device, watch: Watch) -> Comparison:
    """Runs two steps of stock, then two of ours.

    Args:
        plans: plan of both steps, or of each where the run switches.
        overrides: of :data:`SETTINGS`.
        watch: context of our second step.
    """
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    overrides = {**SETTINGS, **overrides}
    # As Megatron's schedule sets it; another test may have set one of another shape.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=device) / NUM_MICRO_BATCHES)
    weights, stock = _stock_steps(overrides, device)
    found, ours = _our_steps(plans, overrides, device, watch, weights)
    found.loss = max(relative_difference(a[0], b[0]) for a, b in zip(ours, stock, strict=True))
    errors = [relative_errors(a[1], b[1]) for a, b in zip(ours, stock, strict=True)]
    found.gradients = {name: max(error[name] for error in errors) for name in errors[0]}
    if overrides.get("bf16"):
        _, true = _stock_steps({**overrides, "bf16": False}, device, weights)
        (_, stock_last), (_, our_last), (_, true_last) = stock[-1], ours[-1], true[-1]
        found.fp32_errors = relative_errors(stock_last, true_last), relative_errors(our_last, true_last)
    return found


type _Steps = list[tuple[list[float], dict[str, torch.Tensor]]]


def _stock_steps(overrides: dict[str, Any], device: torch.device, weights: Any = None) -> tuple[Any, _Steps]:
    """The weights at the start, losses and gradients of both steps."""
    model, config, precision = build(overrides)
    model.cuda()
    if weights is not None:
        model.load_state_dict(copy.deepcopy(weights))
    weights = copy.deepcopy(model.state_dict())
    with _ddp_stream():
        ddp = wrap_with_ddp(model, config, precision, deferred=False)
    steps = [(_step(ddp), gradients(model)) for _ in range(2)]
    logged_losses()
    return weights, steps


def _our_steps(
    plans: Sequence[Plan], overrides: dict[str, Any], device: torch.device, watch: Watch, weights: Any
) -> tuple[Comparison, _Steps]:
    model, config, precision = build(overrides)
    model.cuda()
    model.load_state_dict(copy.deepcopy(weights))
    stats, switches = CommStats(device), len(plans) > 1
    setup = OverlapSetup(plans[0], device, stats, timedelta(minutes=2), switchable=switches)
    setup([model])
    with _ddp_stream():
        ddp = wrap_with_ddp(model, config, precision, setup.delays_weight_grads)
    with paired_schedules(lambda: setup.stages):
        steps = [(setup.check_step(lambda: _step(ddp, plans[0])), gradients(model))]
        stats.take()
        if switches:
            setup.switch(plans[1])
        with watch(), _traced(model, device) as trace:
            losses = setup.check_step(lambda: _step(ddp, plans[-1]))
            found = Comparison(trace=trace.end_step())
    steps.append((losses, gradients(model)))
    found.times = stats.take()
    found.num_reports = [weight.num_reported for weight in deferred_weights(model)]
    logged_losses()
    return found, steps


@contextmanager
def _traced(model: Any, device: torch.device) -> Iterator[Trace]:
    trace = Trace(device, 0)
    model.decoder.comm.record_to(trace)
    trace.begin_step()
    yield trace
    model.decoder.comm.record_to(None)


@contextmanager
def _ddp_stream() -> Iterator[None]:
    """Megatron wraps a model on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _step(ddp: Any, plan: Plan | None = None) -> list[float]:
    """One step; pairs of a plan run in Megatron's own schedule."""
    losses = []
    ddp.zero_grad_buffer()
    if plan is not None and plan.is_paired:
        return scheduled_step(ddp, NUM_MICRO_BATCHES, lambda tensor: tensor.cuda())
    for i, batch in enumerate(micro_batches()):
        with nullcontext() if i == NUM_MICRO_BATCHES - 1 else ddp.no_sync():
            on_device = {name: tensor.cuda() for name, tensor in batch.items()}
            loss = ddp(attention_mask=None, **on_device).float().mean()
            (loss / NUM_MICRO_BATCHES).backward()
        losses.append(loss.detach())
        del loss
    ddp.finish_grad_sync()
    return [loss.item() for loss in losses]
