"""The arguments of a model for inference, and the end of its process groups."""

import argparse
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_lancet.inference.checkpoint_reader import StoredRun
from megatron_lancet.inference.load import _process_groups, model_arguments
from megatron_lancet.training.megatron.models import model_config_from_args

NCCL_EP = {"moe_flex_dispatcher_backend": "ncclep", "moe_expert_rank_capacity_factor": 4.0, "moe_paged_stash": True}
EARLY = "ep_overlap_early_attn_memory_release"


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


@pytest.mark.parametrize(
    "trained_with",
    [
        {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True},
        {"moe_token_dispatcher_type": "flex", **NCCL_EP},
        {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True, EARLY: True},
        {"overlap_dispatch_backward_with_experts_wgrad": True},
    ],
)
def test_dispatcher_and_overlap_of_the_training_are_left_out(trained_with):
    """Megatron checks settings that depend on them, when it makes its configuration."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_experts": 4, "padded_vocab_size": 64}
    stored = argparse.Namespace(
        **{**sizes, "max_position_embeddings": 16, "params_dtype": torch.float32, **trained_with}
    )
    args = model_arguments(StoredRun(Path("checkpoint"), 1, stored, None), torch.device("cpu"), 1)
    config = model_config_from_args(args)
    config.finalize()
    assert config.transformer.moe_token_dispatcher_type == "alltoall"
