"""What ``megatron_lancet.Overlap`` refuses before any message is sent."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import megatron_lancet
from megatron_lancet.errors import UsageError
from megatron_lancet.library.models import device_of, has_experts, language_model_of
from megatron_lancet.library.overlap import Overlap
from megatron_lancet.library.run_arguments import check_packed_samples
from tests.small_gpt import EXPERTS, small_gpt, transformer_config

SHAPE = {"micro_batch_size": 1, "seq_length": 16}


def test_overlap_is_public():
    assert megatron_lancet.Overlap is Overlap
    with pytest.raises(AttributeError, match="has no attribute 'Overlapp'"):
        _ = megatron_lancet.Overlapp


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_chunk": 2}, "did you mean --lancet-num-chunks?"),
        ({"num_chunks": 0}, "--lancet-num-chunks expects at least 1, got 0"),
        ({"plan": "fast"}, "--lancet-plan expects auto, off or a plan file"),
        ({"packed_samples": True, "chunk_dim": "batch"}, "Pass chunk_dim='sequence' or num_chunks=1"),
        ({"profile": "profile.json"}, "--lancet-profile needs pretrain_gpt_moe.py"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(UsageError) as refused:
        Overlap(SimpleNamespace(), **SHAPE, **settings)
    assert message in str(refused.value)


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("nccl", "cuda:3"), ("cpu:gloo,cuda:nccl", "cuda:3")])
def test_model_on_the_host_trains_where_its_ranks_talk(monkeypatch, backend, device):
    """Megatron-Bridge calls its hooks before it moves the weights."""
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_of(torch.nn.Linear(1, 1)) == torch.device(device)


def test_hook_needs_the_configuration_of_ddp():
    with pytest.raises(UsageError, match="expected the DDP configuration of the model"):
        Overlap(**SHAPE)([torch.nn.Linear(2, 2)])


def test_hook_prepares_one_model_only():
    overlap = Overlap(SimpleNamespace(), **SHAPE)
    with pytest.raises(UsageError, match="found 0 in Linear"):
        overlap([torch.nn.Linear(2, 2)])
    with pytest.raises(UsageError, match="has prepared a model already"):
        overlap([torch.nn.Linear(2, 2)])


@pytest.mark.usefixtures("one_rank")
def test_language_model_is_found_in_a_larger_model():
    model = small_gpt(transformer_config(**EXPERTS))
    assert language_model_of(model) is model
    assert language_model_of(torch.nn.Sequential(torch.nn.Linear(2, 2), model)) is model
    assert has_experts(model)
    assert not has_experts(small_gpt(transformer_config()))
    with pytest.raises(UsageError, match="found 2 in ModuleList"):
        language_model_of(torch.nn.ModuleList([model, small_gpt(transformer_config())]))


@pytest.mark.usefixtures("one_rank")
def test_number_of_micro_batches_must_be_known():
    model = small_gpt(transformer_config(**EXPERTS))
    with pytest.raises(UsageError, match="expected num_micro_batches, found none"):
        Overlap(SimpleNamespace(), **SHAPE)([model])


@pytest.mark.parametrize("kind", ["seq_aux_loss", ["aux_loss", "seq_aux_loss"]])
def test_a_row_of_documents_is_no_sequence_of_a_loss(kind):
    check_packed_samples(transformer_config(**EXPERTS), "rope")
    with pytest.raises(UsageError, match="seq_aux_loss does not work with packed samples"):
        check_packed_samples(SimpleNamespace(moe_router_load_balancing_type=kind), "rope")


def test_a_row_of_documents_has_no_embedding_for_each_token():
    with pytest.raises(UsageError, match="mrope does not work with packed samples"):
        check_packed_samples(transformer_config(**EXPERTS), "mrope")
