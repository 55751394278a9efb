"""The virtual GPU itself, by small programs whose order is known: kernels, memory, late streams, copies, operators."""

import os
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from megatron_lancet.runtime.device import on_cuda
from megatron_lancet.testkit.virtual_gpu.device import virtual_gpu
from megatron_lancet.testkit.virtual_gpu.log import Kernel
from megatron_lancet.testkit.virtual_gpu.operators import (
    Kind,
    accesses_of,
    kind_of,
    only_result_in_place,
    results_in_place,
)
from megatron_lancet.training.platform.cpu import cpu_platform

ONES = torch.ones(8)
aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def megatron_on_cpu():
    with mock.patch.dict(os.environ), cpu_platform():
        yield


@contextmanager
def watched(*late: str):
    """A GPU with a second stream, and the two streams by name."""
    with virtual_gpu() as gpu:
        side = gpu.Stream()
        side.name = "side"
        with gpu.watch([stream for stream in gpu.streams if stream.name in late]):
            yield gpu, gpu.current_stream(), side


def kinds(gpu) -> list[str]:
    gpu.memory.take_freed()
    return [problem.kind for problem in gpu.problems]


def test_kernels_of_two_streams_race_if_one_writes():
    with watched() as (gpu, _, side):
        rows = torch.ones(8, device="cuda")
        with gpu.CurrentStream(side):
            rows + 1
        assert kinds(gpu) == ["race"]
        assert "read by add on side" in gpu.problems[0].text


def test_kernels_that_only_read_do_not_race():
    with watched() as (gpu, compute, side):
        rows = torch.ones(8, device="cuda")
        side.wait_stream(compute)
        with gpu.CurrentStream(side):
            rows + 1
        rows + 2
        side.synchronize()
        assert kinds(gpu) == []


def test_kernels_that_write_other_bytes_do_not_race():
    with watched() as (gpu, compute, side):
        rows = torch.ones(8, device="cuda")
        side.wait_stream(compute)
        rows[:4].add_(1)
        with gpu.CurrentStream(side):
            rows[4:].add_(1)
        assert kinds(gpu) == []
        with gpu.CurrentStream(side):
            rows[3:].add_(1)
        assert kinds(gpu) == ["race"]


def test_order_passes_through_a_third_stream():
    with watched() as (gpu, compute, side):
        rows = torch.ones(8, device="cuda")
        third = gpu.Stream()
        third.wait_stream(compute)
        side.wait_stream(third)
        with gpu.CurrentStream(side):
            rows.add_(1)
        assert kinds(gpu) == []


def test_event_stands_for_what_was_enqueued_before_it():
    with watched() as (gpu, compute, side):
        rows = torch.ones(8, device="cuda")
        event = compute.record_event()
        rows.add_(1)
        side.wait_event(event)
        with gpu.CurrentStream(side):
            rows + 1
        assert kinds(gpu) == ["race"]


def test_host_orders_streams_by_waiting():
    with watched() as (gpu, compute, side):
        rows = torch.ones(8, device="cuda")
        compute.record_event().synchronize()
        with gpu.CurrentStream(side):
            rows + 1
        assert kinds(gpu) == []
        assert [wait.reason for wait in gpu.host_waits] == ["event"]


def test_new_memory_is_not_for_a_stream_that_did_not_wait():
    with watched() as (gpu, compute, side):
        ready = compute.record_event()
        buffer = torch.empty(8, device="cuda")
        side.wait_event(ready)
        with gpu.CurrentStream(side):
            buffer.fill_(1)
        assert kinds(gpu) == ["race"]
        assert "allocation on compute" in gpu.problems[0].text


@pytest.mark.parametrize(
    ("keeps", "problems"),
    [
        ("nothing", ["freed in use"]),
        ("record_stream", []),
        ("wait", []),
        ("record_stream of one that waits", []),
        ("record_stream of one that does not", ["freed in use"]),
    ],
)
def test_memory_is_freed_behind_all_that_use_it(keeps, problems):
    with watched() as (gpu, compute, side):
        rows = torch.ones(8, device="cuda")
        third = gpu.Stream()
        side.wait_stream(compute)
        with gpu.CurrentStream(side):
            rows + 1
        if keeps == "record_stream":
            rows.record_stream(side)
        elif keeps == "wait":
            compute.wait_stream(side)
        elif keeps.startswith("record_stream of one"):
            rows.record_stream(third)
        if keeps.endswith("that waits"):
            third.wait_stream(side)
        del rows
        assert kinds(gpu) == problems


@pytest.mark.parametrize("waits", [False, True])
def test_late_stream_runs_when_another_waits_for_it(waits):
    with watched("side") as (gpu, compute, side):
        rows = torch.ones(8, device="cuda")
        side.wait_stream(compute)
        with gpu.CurrentStream(side):
            rows.add_(1)
        if waits:
            compute.wait_stream(side)
        result = rows * 10
    assert torch.equal(result, 20 * ONES if waits else 10 * ONES)


def test_results_of_a_late_stream_are_poison_until_it_runs():
    with watched("side") as (gpu, _, side):
        with gpu.CurrentStream(side):
            result = torch.ones(8, device="cuda") + 1
        early = result.clone()
        assert not side.query()
        side.synchronize()
        assert side.query()
    assert early.isnan().all()
    assert torch.equal(result, 2 * ONES)


def test_late_stream_adds_a_product_of_bf16_to_fp32():
    """The operator of which torch 2.11 can't tell the result's shape."""
    with watched("side") as (gpu, compute, side):
        total = torch.ones(8, 8, device="cuda")
        half = torch.ones(8, 8, device="cuda", dtype=torch.bfloat16)
        side.wait_stream(compute)
        with gpu.CurrentStream(side):
            torch.addmm(total, half, half, out_dtype=torch.float32, out=total)
        early = total.clone()
        side.synchronize()
        assert torch.equal(early, ONES.expand(8, 8))
        assert torch.equal(total, 9 * ONES.expand(8, 8))


def test_freed_memory_is_poisoned_on_the_stream_that_owns_it():
    """A late reader of memory that nobody kept reads poison; with ``record_stream`` it reads what was there."""
    results = {}
    for keeps in (False, True):
        with watched("side") as (gpu, compute, side):
            rows = torch.ones(8, device="cuda")
            side.wait_stream(compute)
            with gpu.CurrentStream(side):
                result = rows * 3
            if keeps:
                rows.record_stream(side)
            del rows
            torch.zeros(1, device="cuda")
        results[keeps] = result
    assert results[False].isnan().all()
    assert torch.equal(results[True], 3 * ONES)


def test_host_waits_before_it_looks_at_a_tensor_of_the_gpu():
    with watched("compute") as (gpu, _, _):
        rows = torch.ones(8, device="cuda")
        assert rows.sum().item() == 8.0
        assert rows.tolist() == 8 * [1.0]
        assert torch.tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
        assert [wait.reason for wait in gpu.host_waits] == ["_local_scalar_dense", "tolist"]


@pytest.mark.parametrize("waits", [False, True])
def test_host_must_wait_for_a_copy_to_its_memory(waits):
    with watched("compute") as (gpu, compute, _):
        on_host = torch.empty(8, pin_memory=True)
        on_host.copy_(torch.ones(8, device="cuda"), non_blocking=True)
        if waits:
            compute.record_event().synchronize()
        values = on_host.tolist()
        assert kinds(gpu) == ([] if waits else ["race"])
    assert (values == 8 * [1.0]) is waits


def test_time_between_events_needs_a_wait_of_the_host():
    with watched() as (gpu, compute, _):
        start, end = (gpu.Event(enable_timing=True) for _ in range(2))
        start.record()
        with pytest.raises(RuntimeError, match="must be recorded"):
            start.elapsed_time(end)
        torch.ones(8, device="cuda")
        end.record()
        with pytest.raises(RuntimeError, match="has not waited"):
            start.elapsed_time(end)
        compute.synchronize()
        assert start.elapsed_time(end) == 0.0


def test_views_and_allocations_are_no_kernels():
    with watched() as (gpu, _, _):
        rows = torch.empty(8, device="cuda")
        rows.view(2, 4).t().detach()
        assert not [entry for entry in gpu.log if isinstance(entry, Kernel)]
        rows.zero_()
        assert [entry.name for entry in gpu.log if isinstance(entry, Kernel)] == ["zero_"]


@pytest.mark.parametrize(
    ("function", "arguments", "kind"),
    [
        (aten.add.Tensor, (ONES, ONES), Kind.KERNEL),
        (aten.view.default, (ONES, [2, 4]), Kind.NO_KERNEL),
        (aten.split.Tensor, (ONES, 2), Kind.NO_KERNEL),
        (aten.empty_like.default, (ONES,), Kind.ALLOCATION),
        (aten._local_scalar_dense.default, (ONES[0],), Kind.HOST_WAITS),
        (aten.nonzero.default, (ONES,), Kind.HOST_WAITS),
        (aten.index.Tensor, (ONES, [ONES.bool()]), Kind.HOST_WAITS),
        (aten.index.Tensor, (ONES, [torch.arange(2)]), Kind.KERNEL),
        (aten.index_put_.default, (ONES, [ONES.bool()], torch.zeros(())), Kind.KERNEL),
        (aten.index_put_.default, (ONES, [ONES.bool()], torch.zeros(8)), Kind.HOST_WAITS),
        (aten.repeat_interleave.Tensor, (torch.arange(3),), Kind.HOST_WAITS),
    ],
)
def test_operators_are_kernels_views_allocations_or_waits(function, arguments, kind):
    assert kind_of(function, arguments, {}) is kind


def test_operators_read_and_write_what_their_schema_says():
    a, b, out = ONES.clone(), ONES.clone(), ONES.clone()
    added = accesses_of(aten.add.out, (a, b), {"out": out})
    assert [id(one) for one in added.reads] == [id(a), id(b)]
    assert [id(one) for one in added.writes] == [id(out)]
    in_place = accesses_of(aten._foreach_add_.List, ([a, out], [b, b]), {})
    assert [id(one) for one in in_place.writes] == [id(a), id(out)]
    assert results_in_place(aten.add_.Tensor, (a, b), {}) == [a]
    assert only_result_in_place(aten.add_.Tensor, (a, b), {}) is a
    assert only_result_in_place(aten.add.out, (a, b), {"out": out}) is out
    assert only_result_in_place(aten.add.Tensor, (a, b), {}) is None


def test_torch_is_itself_again_afterwards():
    before = torch.cuda.Stream, torch.Tensor.record_stream, torch.tensor
    with watched():
        assert on_cuda(torch.ones(1))
    assert (torch.cuda.Stream, torch.Tensor.record_stream, torch.tensor) == before
    assert not on_cuda(torch.ones(1))
