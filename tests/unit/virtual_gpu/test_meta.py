"""Tensors without values: what the host still knows, what it can't, and what is logged."""

import pytest
import torch

from megatron_lancet.testkit.virtual_gpu.device import virtual_gpu
from megatron_lancet.testkit.virtual_gpu.log import HostWaits, Kernel
from megatron_lancet.testkit.virtual_gpu.meta import MetaGpu
from megatron_lancet.training.platform.cpu import cpu_platform


@pytest.fixture
def gpu():
    own = MetaGpu(lambda name, args: None)
    with cpu_platform(), virtual_gpu(own), own.watch():
        yield own


def kernels(gpu) -> list[str]:
    return [entry.name for entry in gpu.log if isinstance(entry, Kernel)]


def num_host_waits(gpu) -> int:
    return sum(isinstance(entry, HostWaits) for entry in gpu.log)


def test_float_tensors_have_shapes_and_no_values(gpu):
    a = torch.ones(4, 8, device="cuda")
    assert (a @ a.t()).shape == (4, 4)
    assert kernels(gpu) == ["ones", "mm"]
    with pytest.raises(NotImplementedError, match=r"needs the values of a tensor \[4, 8\] of torch.float32"):
        a.tolist()


def test_small_integer_tensors_keep_their_values(gpu):
    counts = torch.arange(6, device="cuda").view(2, 3)
    received = torch.empty_like(counts)
    received.copy_(counts)
    received[1] += 10
    assert received.sum(dim=1).tolist() == [3, 42]
    assert num_host_waits(gpu) == 1


def test_integers_that_depend_on_floats_are_unknown(gpu):
    counts = torch.arange(4, device="cuda")
    counts.copy_(torch.ones(4, device="cuda"))
    with pytest.raises(NotImplementedError):
        counts.tolist()


def test_copy_to_pinned_memory_does_not_wait_and_has_the_values(gpu):
    counts = torch.arange(4, device="cuda")
    on_host = torch.empty(4, dtype=torch.int64, pin_memory=True)
    on_host.copy_(counts, non_blocking=True)
    assert num_host_waits(gpu) == 0
    assert on_host.tolist() == [0, 1, 2, 3]
    assert counts.cpu().tolist() == [0, 1, 2, 3]
    assert num_host_waits(gpu) == 1


def test_copy_to_the_gpu_keeps_known_values(gpu):
    moved = torch.tensor([5, 7]).cuda()
    assert moved.is_meta
    assert moved.tolist() == [5, 7]


def test_item_makes_the_host_wait(gpu):
    assert int(torch.arange(4, device="cuda").sum()) == 6
    assert num_host_waits(gpu) == 1


def test_operators_on_the_host_are_not_logged(gpu):
    assert torch.arange(4).sum().item() == 6
    assert not gpu.log


def test_supplied_values_are_those_of_the_operator():
    own = MetaGpu(lambda name, args: torch.tensor([3, 1]) if name == "sum" else None)
    with cpu_platform(), virtual_gpu(own), own.watch():
        routing_map = torch.ones(4, 2, device="cuda") > 0
        assert routing_map.sum(dim=0).tolist() == [3, 1]


def test_module_moves_to_gpu_with_attributes_of_its_parameters(gpu):
    linear = torch.nn.Linear(2, 2)
    linear.weight.allreduce = False
    linear.cuda()
    assert linear.weight.is_meta
    assert linear.weight.allreduce is False


def test_compiled_function_is_one_kernel(gpu):
    a = torch.ones(4, 8, device="cuda")
    gpu.run_as_one(lambda x: x * 2 + x, [a])
    assert [(one.flops, one.num_bytes) for one in gpu.log[1:]] == [(0, 2 * 4 * 8 * 4)]
