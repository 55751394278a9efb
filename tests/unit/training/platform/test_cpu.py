"""Megatron on a machine without a GPU: what is pretended, what is refused, and that all of it is undone."""

import sys

import pytest
import torch
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.transformer.moe import token_dispatcher

from megatron_lancet.errors import UsageError
from megatron_lancet.patching import replaced
from megatron_lancet.training.platform import cpu as stand_ins
from megatron_lancet.training.platform.detect import apply_cpu_settings


def replaced_names() -> list[tuple[object, str]]:
    names: list[tuple[object, str]] = [(torch.cuda, name) for name in stand_ins._cuda_stand_ins()]
    names += [(torch, name) for name in stand_ins._FACTORIES]
    names += [
        (mappings, "_gather_along_first_dim"),
        (mappings, "_reduce_scatter_along_first_dim"),
        (token_dispatcher, "maybe_move_tensor_to_cpu"),
    ]
    return [
        *names,
        (torch.Tensor, "cuda"),
        (torch.Tensor, "type"),
        (torch.Tensor, "record_stream"),
        (torch.nn.Module, "cuda"),
    ]


def test_cpu_platform_restores_torch_and_megatron():
    before = [getattr(owner, name) for owner, name in replaced_names()]
    with stand_ins.cpu_platform():
        inside = [getattr(owner, name) for owner, name in replaced_names()]
    assert all(a is not b for a, b in zip(before, inside, strict=True))
    assert [getattr(owner, name) for owner, name in replaced_names()] == before


def test_cpu_platform_restores_torch_and_megatron_after_an_error():
    before = [getattr(owner, name) for owner, name in replaced_names()]
    with pytest.raises(KeyError), stand_ins.cpu_platform():
        raise KeyError
    assert [getattr(owner, name) for owner, name in replaced_names()] == before


def test_cpu_platform_has_what_megatron_calls():
    with stand_ins.cpu_platform():
        assert torch.cuda.is_available()
        assert torch.tensor([1.0], device="cuda").device.type == "cpu"
        assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
        # The optimizers compare these names.
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).cuda().type() == "torch.cuda.BFloat16Tensor"
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda.current_stream().wait_stream(stream)
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    assert not torch.cuda.is_available()
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_cpu_platform_uses_torchs_random_state():
    with stand_ins.cpu_platform():
        torch.cuda.manual_seed(7)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.rand(3).equal(first)


@pytest.fixture
def gpu_script(monkeypatch):
    """Arguments as a script for GPUs passes them."""
    from megatron.training.arguments import parse_args

    def make(*words: str):
        monkeypatch.setattr(sys, "argv", ["pretrain", "--transformer-impl", "transformer_engine", *words])
        return parse_args()

    return make


def test_cpu_platform_accepts_flags_of_a_gpu_script(gpu_script):
    from megatron.core.transformer.enums import AttnBackend

    args = gpu_script("--distributed-backend", "nccl", "--moe-permute-fusion", "--attention-backend", "flash")
    apply_cpu_settings(args)
    assert args.transformer_impl == "local"
    assert args.distributed_backend == "gloo"
    assert not args.gradient_accumulation_fusion
    assert not args.moe_permute_fusion
    assert args.attention_backend is AttnBackend.unfused


@pytest.mark.parametrize("has_apex", [True, False])
def test_cpu_platform_keeps_settings_of_te_where_it_is_installed(gpu_script, has_apex):
    fp8 = ("--fp8-format", "hybrid", "--fp8-recipe", "delayed")
    with replaced(megatron_te, "HAVE_TE", True), replaced(layers, "_grad_accum_fusion_available", has_apex):
        args = gpu_script(*fp8, "--tp-comm-overlap", "--moe-permute-fusion")
        apply_cpu_settings(args)
        assert (args.transformer_impl, args.fp8, args.fp8_recipe) == ("transformer_engine", "hybrid", "delayed")
        assert args.gradient_accumulation_fusion == has_apex  # Megatron's output layer has the same setting
        assert (args.moe_permute_fusion, args.tp_comm_overlap) == (True, False)
        local = gpu_script("--transformer-impl", "local", "--moe-permute-fusion")
        apply_cpu_settings(local)
        assert (local.gradient_accumulation_fusion, local.moe_permute_fusion) == (False, False)
        with pytest.raises(UsageError, match="--fp8-format needs a GPU"):
            apply_cpu_settings(gpu_script("--transformer-impl", "local", *fp8))


@pytest.mark.parametrize(
    "words",
    [["--fp8-format", "hybrid"], ["--use-megatron-fsdp"], ["--cuda-graph-impl", "local"]],
)
def test_cpu_platform_refuses_flags_without_cpu_counterpart(gpu_script, words):
    with pytest.raises(UsageError, match="this machine has none"):
        apply_cpu_settings(gpu_script(*words))


def test_type_of_a_subclass_of_tensor_names_cuda_once():
    """A subclass that forwards torch's functions, like Megatron's sharded weights, calls ``type`` twice."""

    class Weight(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return super().__torch_function__(function, types, args, kwargs or {})

        def type(self, *args):
            return super().type(*args)

    with stand_ins.cpu_platform():
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).as_subclass(Weight).type() == "torch.cuda.FloatTensor"


def test_streams_of_a_cpu_keep_no_tensor():
    with stand_ins.cpu_platform():
        torch.ones(1).record_stream(torch.cuda.current_stream())
