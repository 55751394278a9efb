"""All-to-alls first: gradients are reduced in micro-ops, at fixed places, and come out as without."""

import copy
import json
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.patching import around
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.reductions import MicroOps
from tests.fakes import cpu_stats
from tests.gradient_deviations import TOLERANCE, precision_of
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.disturbances import erratic_wire
from tests.parity.gradients.gradients_worker import (
    build,
    close,
    largest,
    logged_losses,
    plan_of,
    step,
)
from tests.ranks import launch
from tests.ranks.pretraining import EP2, pretrain

pytestmark = pytest.mark.distributed

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
PRIORITY = ["--overlap-grad-reduce", "--lancet-comm-priority", "all-to-all-first", "--lancet-grad-chunk-mb", "0.15"]


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
    from megatron_lancet.features.comm_priority import grad_reduction
    from megatron_lancet.runtime import all_to_all
    from megatron_lancet.runtime.comm import Comm

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


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    with parallel({"expert_model_parallel_size": 2}):
        results: dict[str, Any] = {case: compare(case) for case in CASES}
        results["erratic-wire"] = compare("reduce-scatter/k=2", erratic_wire)
        results["chunk-too-small"] = what_a_chunk_too_small_raises()
        return results


results = launch.results(all_results, 2, timeout_s=120)
"""Per rank: what is found for each case."""


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_whole_buckets(results, case, check_gradients):
    bound = 0.0 if case.endswith("/k=1") else TOLERANCE
    for rank, result in enumerate(results):
        found = result[case]
        assert found["has_gradients"]
        assert found["equals_ours_without_priority"]
        check_gradients(found["gradients"], bound, f"rank {rank}", precision_of(case))
        assert found["loss"] <= bound


@pytest.mark.parametrize("case", CASES)
def test_dense_gradients_are_reduced_once_in_micro_ops(results, case):
    """The experts' have no other rank to be reduced with."""
    for result in results:
        found = result[case]
        sizes = [int(entry.split()[1]) for entry in found["log"] if entry.startswith("reduce")]
        assert sum(sizes) == found["grad_bytes"] == found["dense_bytes"]
        assert max(sizes) <= CHUNK_BYTES
        assert len(sizes) == found["num_micro_ops"]
        assert found["grad_exposed_ms"] > 0


def check_places(log: list[str]) -> tuple[int, int]:
    """Micro-ops that left before the last all-to-all was back, and after; fails for one that left next to another."""
    last = max(i for i, entry in enumerate(log) if entry.startswith("back"))
    out: set[str] = set()
    room = 0
    num_between = 0
    for entry in log[:last]:
        if entry.startswith("back "):
            out.remove(entry.removeprefix("back "))
            room = CHUNK_BYTES
        elif ".I." in entry:
            out.add(entry)
        elif entry.startswith("reduce"):
            room -= int(entry.split()[1])
            assert not out
            assert room >= 0, "more than one chunk at a place"
            num_between += 1
    return num_between, sum(entry.startswith("reduce") for entry in log[last:])


@pytest.mark.parametrize("case", CASES)
def test_micro_ops_are_launched_where_no_all_to_all_is_pending(results, case):
    for result in results:
        found = result[case]
        between, after = check_places(found["log"])
        assert between == found["num_between"]
        assert after > 0
        # With two chunks in the whole stack, one of them is on the wire from the first combine to the last dispatch.
        assert (between > 0) == (case != "stack/k=2")


@pytest.mark.parametrize("case", CASES)
def test_order_of_collectives_is_the_same_on_all_ranks(results, case):
    assert results[0][case]["log"] == results[1][case]["log"]


def test_order_of_collectives_does_not_depend_on_the_wire(results):
    for result in results:
        found = result["erratic-wire"]
        assert found["equals_ours_without_priority"]
        assert found["log"] == result["reduce-scatter/k=2"]["log"]


def test_gradient_chunk_smaller_than_a_parameter_is_refused(results):
    for result in results:
        assert result["chunk-too-small"].startswith("--lancet-grad-chunk-mb 0.0001 is less than the smallest parameter")


LAYOUTS = {
    "distributed-optimizer": (
        2,
        "--num-layers 4 --use-distributed-optimizer --overlap-param-gather --bf16 --clip-grad 0.1".split(),
    ),
    "PP2": (4, "--num-layers 6 --pipeline-model-parallel-size 2".split()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_equal_stock(token_data, tmp_path, layout):
    """The real loop, several micro-batches, clipped: one chunk, so that not a bit may differ."""
    num_ranks, flags = LAYOUTS[layout]
    both = [*EP2, *flags, "--ddp-bucket-size", "10000", "--overlap-grad-reduce"]
    expected = pretrain(token_data, [*both, "--lancet-plan", "off"], tmp_path / "stock", num_ranks, train_iters=5)
    ours = ["--lancet-num-chunks", "1", "--lancet-report", tmp_path, *PRIORITY]
    found = pretrain(token_data, [*both, *ours], tmp_path / "ours", num_ranks, train_iters=5)
    assert len(found.losses) == 5
    for name in ("lm loss", "grad norm"):
        assert found.series(name) == expected.series(name), name
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["grad_bytes"] > 0
    assert 0 < report["num_grad_micro_ops_between"] < report["num_grad_micro_ops"]
    assert "between all-to-alls and the others after the last" in "".join(found.outputs)


def test_different_comm_priority_on_one_rank_is_refused(token_data, tmp_path):
    from tests.ranks.pretraining import command_line

    arguments = command_line(token_data, [*EP2, "--train-iters", "2", "--lancet-num-chunks", "1", *PRIORITY])
    script = launch.REPO / "pretrain_gpt_moe.py"
    per_rank = [[], ["--lancet-grad-chunk-mb", "0.2"]]
    results = launch.run(script, arguments, 2, tmp_path, 60, per_rank=per_rank)
    assert [result.returncode for result in results] == [2, 2]
    for result in results:
        assert "grad_chunk_mb is 0.15 on rank 0, 0.2 on rank 1" in result.output.splitlines()[-1]
