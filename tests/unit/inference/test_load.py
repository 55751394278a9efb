"""How a model's process groups end."""

import argparse
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_lancet.inference.load import _process_groups


@pytest.mark.parametrize(
    ("device", "fails", "ends"), [("cuda", False, True), ("cuda", True, False), ("cpu", True, True)]
)
def test_failed_rank_does_not_wait_for_nccl(monkeypatch, device, fails, ends):
    """NCCL ends a group when its kernels end; after a failure they wait for the rows of the rank that failed."""
    ended: list[str] = []
    for module, name in (
        (torch.cuda, "set_device"),
        (dist, "init_process_group"),
        (parallel_state, "initialize_model_parallel"),
        (tensor_parallel, "model_parallel_cuda_manual_seed"),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr(parallel_state, "destroy_model_parallel", lambda: ended.append("Megatron's"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append("torch's"))
    args = argparse.Namespace(world_size=2, expert_model_parallel_size=2, seed=1)
    with suppress(MemoryError), _process_groups(torch.device(device), args):
        if fails:
            raise MemoryError
    assert ended == (["Megatron's", "torch's"] if ends else [])
