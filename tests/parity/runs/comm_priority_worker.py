"""Gradients and the order of collectives where all-to-alls go first: two ranks, EP=2, so dense DP=2 on the same wire.

Usage: comm_priority_worker.py RESULT.json. Each rank writes RESULT.json.<rank>.
"""

import copy
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.patching import around
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.reductions import MicroOps
from tests.fakes import cpu_stats
from tests.parity.gradients.disturbances import erratic_wire
from tests.parity.gradients.gradients_worker import (
    NUM_MICRO_BATCHES,
    build,
    close,
    largest,
    logged_losses,
    plan_of,
    step,
)
from tests.ranks.worker import finish, run_on_cpu

NUM_STEPS = 2
"""In DDP's first one reductions start at its end."""
CHUNK_BYTES = 9_000
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Plan]] = {
    "all-reduce/k=1": ({}, {}, plan_of(1)),
    "all-reduce/k=2": ({"share_embeddings": True}, {}, plan_of(2, over="gate")),
    "dw-none/k=1": ({}, {}, plan_of(1, dw="none")),
    "bf16/k=1": ({"bf16": True}, {"grad_reduce_in_fp32": False}, plan_of(1)),
    "reduce-scatter/k=1": ({}, {"use_distributed_optimizer": True}, plan_of(1)),
    "reduce-scatter/k=2": ({}, {"use_distributed_optimizer": True}, plan_of(2, over="gate")),
    "reduce-scatter/bf16/k=1": ({"bf16": True}, {"use_distributed_optimizer": True}, plan_of(1)),
    "stack/k=2": ({}, {"use_distributed_optimizer": True}, plan_of(2)),
}
"""Overrides of the model, of DDP's configuration, and the plan."""


def wrap_with_ddp(model, config, precision, deferred: bool, settings: dict[str, Any]):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = {"grad_reduce_in_fp32": True, **settings}
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        bucket_size=3000,
        check_for_nan_in_grad=True,
        delay_wgrad_compute=deferred,
        **settings,
    )
    return DistributedDataParallel(config, ddp_config, precision(config, model))


def reduced(ddp) -> list[torch.Tensor]:
    """What the optimizer reads: per bucket, all of it, or this rank's shard of a reduce-scatter."""
    found = []
    for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
        for bucket in group.buckets:
            gradients = bucket.grad_data
            if ddp.ddp_config.use_distributed_optimizer:
                ranks = group.intra_distributed_optimizer_instance_group
                gradients = gradients.chunk(ranks.size())[ranks.rank()]
            found.append(gradients.clone())
    return found


def log_collectives(stack: ExitStack) -> list[str]:
    """Everything that is started from here on, and which backward all-to-all was waited for."""
    from megatron_lancet.runtime import all_to_all
    from megatron_lancet.runtime.comm import Comm
    from megatron_lancet.training.megatron import grad_reduction

    log: list[str] = []

    def starts(stock, comm, op, *args):
        log.append(str(op))
        return stock(comm, op, *args)

    def waits(stock, comm, op, handle):
        received = stock(comm, op, handle)
        log.append(f"back {op}")
        return received

    def launches(stock, micro_op):
        log.append(f"reduce {micro_op.num_bytes}")
        stock(micro_op)

    for name in ("launch", "launch_when_known", "launch_counts"):
        stack.enter_context(around(Comm, name, starts))
    stack.enter_context(around(all_to_all, "wait_in_backward", waits))
    for kind in (grad_reduction._AllReduce, grad_reduction._ReduceScatter):
        stack.enter_context(around(kind, "launch", launches))
    return log


def run(stack: ExitStack, case: str, weights: dict[str, Any], plan: Plan | None, micro_ops: MicroOps | None):
    """Losses and gradients of each step, what was started in the last one, and its counters."""
    from megatron_lancet.features.comm_priority.feature import ActivePriority
    from megatron_lancet.training.overlap_setup import OverlapSetup

    overrides, settings, _ = CASES[case]
    model, config, precision = build(overrides)
    model.load_state_dict(copy.deepcopy(weights))
    stats = cpu_stats()
    before = set(distributed_c10d._world.pg_map)
    setup = None
    priority = [] if micro_ops is None else [ActivePriority(micro_ops, stats)]
    if plan is not None:
        setup = OverlapSetup(plan, torch.device("cpu"), stats, timedelta(minutes=2), features=priority)
        setup([model])
        for feature in priority:
            feature.enter(stack)
    stats.groups = [group for group in distributed_c10d._world.pg_map if group not in before]
    ddp = wrap_with_ddp(model, config, precision, setup is not None and setup.delays_weight_grads, settings)
    log = log_collectives(stack)
    results = []
    for _ in range(NUM_STEPS):
        log.clear()
        stats.take()
        losses = step(ddp) if setup is None else setup.check_step(lambda: step(ddp))
        for feature in priority:
            feature.observe(lambda: None)
        results.append((losses, reduced(ddp)))
    times = stats.take()
    close(stats)
    logged_losses()
    return results, list(log), times, sum(group.buckets[0].grad_data.nbytes for group in ddp.bucket_groups)


def same(ours, theirs) -> bool:
    """Whether all losses and gradients are equal to the bit."""
    return all(
        our_losses == their_losses and all(map(torch.equal, our_grads, their_grads))
        for (our_losses, our_grads), (their_losses, their_grads) in zip(ours, theirs, strict=True)
    )


def distance(ours, stock) -> dict[str, Any]:
    """Largest relative difference of the losses, and error of the gradients by bucket, over all steps."""
    pairs = list(zip(ours, stock, strict=True))
    by_step = [relative_errors(in_buckets(our_grads), in_buckets(its)) for (_, our_grads), (_, its) in pairs]
    return {
        "loss": max(relative_difference(our_losses, its_losses) for (our_losses, _), (its_losses, _) in pairs),
        "gradients": largest(by_step),
    }


def in_buckets(gradients: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"bucket {i}": gradient for i, gradient in enumerate(gradients)}


def compare(case: str, disturb=None) -> dict[str, Any]:
    overrides, _, plan = CASES[case]
    weights = build(overrides)[0].state_dict()
    with ExitStack() as stack:
        stock, *_ = run(stack, case, weights, None, None)
    with ExitStack() as stack:
        free, *_ = run(stack, case, weights, plan, None)
    with ExitStack() as stack:
        if disturb is not None:
            disturb(stack)
        ours, log, times, dense_bytes = run(stack, case, weights, plan, MicroOps(CHUNK_BYTES))
    return {
        "equals_ours_without_priority": same(ours, free),
        **distance(ours, stock),
        "has_gradients": all(bool(gradient.any()) for _, gradients in ours for gradient in gradients),
        "log": log,
        "num_micro_ops": times.num_grad_micro_ops,
        "num_between": times.num_grad_micro_ops_between,
        "grad_bytes": times.grad_bytes,
        "grad_exposed_ms": times.grad_exposed_ms,
        "dense_bytes": dense_bytes,
    }


def what_a_chunk_too_small_raises() -> str:
    from megatron_lancet.errors import UsageError

    weights = build({})[0].state_dict()
    try:
        with ExitStack() as stack:
            run(stack, "all-reduce/k=1", weights, plan_of(1), MicroOps(100))
    except UsageError as error:
        return str(error)
    return ""


def main() -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, create_gloo_process_groups=False)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / NUM_MICRO_BATCHES)
    results: dict[str, Any] = {case: compare(case) for case in CASES}
    results["erratic-wire"] = compare("reduce-scatter/k=2", erratic_wire)
    results["chunk-too-small"] = what_a_chunk_too_small_raises()
    finish(results)


if __name__ == "__main__":
    run_on_cpu(main)
