"""One small model on the virtual GPU, beside stock on the same weights: gradients, and what the GPU found."""

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.mock.mock_world import mock_world
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.reductions import MicroOps
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.platform.virtual import virtual_gpu_platform
from megatron_lancet.virtual_gpu.log import HostWaits
from megatron_lancet.virtual_gpu.memory import Problem
from tests.parity.gradients.gradients_worker import NUM_MICRO_BATCHES, build, gradients, logged_losses, micro_batches

NUM_RANKS, EP = 8, 4


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        plans: plan of each step after the first; one for all if the run is not switchable.
        overrides: of the model's config.
        late: names of streams that run as late as the order permits.
    """

    plans: Sequence[Plan]
    overrides: dict[str, Any] = field(default_factory=dict)
    switchable: bool = False
    overlap_grad_reduce: bool = True
    distributed_optimizer: bool = False
    micro_op_mb: float | None = None
    late: Sequence[str] = ()
    layout: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """
    Attributes:
        gradients: largest relative error of each parameter's gradient in any step.
    """

    loss: float
    gradients: dict[str, float]
    problems: Sequence[Problem]
    host_waits: Sequence[HostWaits]
    log: Sequence[Any]
    names: Sequence[str]


def run(case: Case, change: Callable[[ExitStack], None] | None = None) -> Found:
    """Runs stock without streams, then ours on the virtual GPU.

    Args:
        change: what a mutant changes, for the time of our run.
    """
    from megatron.core import parallel_state

    from megatron_lancet.training.megatron.mock_patches import loopback_counts

    overrides = {"num_moe_experts": 8, "expert_model_parallel_size": EP, **case.overrides}
    with mock_world(NUM_RANKS), loopback_counts():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=EP, **case.layout)
        try:
            stock = _stock_steps(case, overrides)
            with virtual_gpu_platform() as gpu, ExitStack() as stack:
                if change is not None:
                    change(stack)
                return _our_steps(case, overrides, stock, gpu, stack)
        finally:
            parallel_state.destroy_model_parallel()


def _stock_steps(case: Case, overrides: dict[str, Any]) -> tuple[Any, tuple[list[float], dict[str, torch.Tensor]]]:
    model, config, precision = build(overrides)
    weights = copy.deepcopy(model.state_dict())
    ddp = _wrapped(case, model, config, precision, False)
    found = _step(ddp), gradients(model)
    logged_losses()
    return weights, found


def _wrapped(case: Case, model: Any, config: Any, precision: Any, deferred: bool) -> Any:
    """As Megatron does it, on a stream of its own."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=case.overlap_grad_reduce,
        bucket_size=4000 if case.overlap_grad_reduce else None,
        grad_reduce_in_fp32=True,
        delay_wgrad_compute=deferred,
        use_distributed_optimizer=case.distributed_optimizer,
    )
    stream = torch.cuda.Stream()
    stream.name = "DDP"
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ddp = DistributedDataParallel(config, ddp_config, precision(config, model))
    torch.cuda.current_stream().wait_stream(stream)
    return ddp


def _step(ddp: Any) -> list[float]:
    losses = []
    ddp.zero_grad_buffer()
    for i, batch in enumerate(micro_batches()):
        with nullcontext() if i == NUM_MICRO_BATCHES - 1 else ddp.no_sync():
            on_gpu = {name: tensor.cuda() for name, tensor in batch.items()}
            loss = ddp(attention_mask=None, **on_gpu).float().mean()
            (loss / NUM_MICRO_BATCHES).backward()
        losses.append(loss.detach())
        del loss
    ddp.finish_grad_sync()
    return [loss.item() for loss in losses]


def _our_steps(case: Case, overrides: dict[str, Any], stock: Any, gpu: Any, stack: ExitStack) -> Found:
    weights, (losses, expected) = stock
    model, config, precision = build(overrides)
    model.load_state_dict(copy.deepcopy(weights))
    model.cuda()
    device = torch.device("cuda")
    stats = CommStats(device)
    micro_ops = MicroOps(round(case.micro_op_mb * 1e6)) if case.micro_op_mb is not None else None
    setup = OverlapSetup(case.plans[0], device, stats, timedelta(minutes=2), False, case.switchable, micro_ops)
    if setup.scheduler is not None:
        from megatron_lancet.training.megatron.grad_reduction import reductions_in_micro_ops

        stack.enter_context(reductions_in_micro_ops(setup.scheduler))
    setup([model])
    _name_streams(setup)
    ddp = _wrapped(case, model, config, precision, setup.delays_weight_grads)
    _step(ddp)  # DDP only counts; from the second step on reductions start as gradients become ready
    logged_losses()
    loss, errors = 0.0, dict.fromkeys(expected, 0.0)
    for plan in case.plans:
        if case.switchable:
            setup.switch(plan)
        late = [stream for stream in gpu.streams if any(name in stream.name for name in case.late)]
        with gpu.watch(late):
            found = setup.check_step(lambda: _step(ddp))
        loss = max(loss, relative_difference(found, losses))
        for name, error in relative_errors(gradients(model), expected).items():
            errors[name] = max(errors[name], error)
        logged_losses()
    stats.take()
    return Found(loss, errors, list(gpu.problems), gpu.host_waits, gpu.log, [one.name for one in gpu.streams])


def _name_streams(setup: OverlapSetup) -> None:
    for name, value in vars(setup._comm.transport).items():
        if hasattr(value, "record_event"):
            value.name = f"comm{name}"
