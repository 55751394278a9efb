"""What Transformer Engine's modules refuse in chunks, with stand-ins for the modules that Megatron builds."""

from contextlib import nullcontext

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_lancet.errors import UsageError
from megatron_lancet.features.te.attention import TEAttentionPerChunk
from megatron_lancet.features.te.linear import TELinearPerChunk
from megatron_lancet.model.chunking import Chunk
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.dw_queue import DwRules
from tests.fakes import cpu_stats


class _Linear(torch.nn.Linear):
    is_first_microbatch = False
    wgrad_store = None


class _LinearPerChunk(TELinearPerChunk, _Linear):
    pass


class _Attention(torch.nn.Module):
    def forward(self, query, key, value, attention_mask, attn_mask_type, **kwargs):
        return query + kwargs["attention_bias"]


class _AttentionPerChunk(TEAttentionPerChunk, _Attention):
    pass


REGISTER = ("register_hook", "register_post_accumulate_grad_hook")


@pytest.mark.parametrize("register", REGISTER)
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_te_module_with_a_gradient_hook_is_not_deferred(register, name):
    linear = _LinearPerChunk(3, 2)
    assert linear.trains_weight
    handle = getattr(linear.get_parameter(name), register)(lambda _: None)
    assert not linear.trains_weight
    handle.remove()
    assert linear.trains_weight
    linear.weight.requires_grad_(False)
    assert not linear.trains_weight


@pytest.mark.parametrize("register", REGISTER)
def test_later_gradient_hook_on_a_te_module_is_refused(register):
    """Autograd would call it without a gradient."""
    linear = _LinearPerChunk(3, 2)
    linear.begin_deferring("L1.W.fc", WeightGradStore(DwRules(1), cpu_stats()))
    for _ in linear.parameters():
        linear.register_wgrad_accumulation_and_reduce_hooks(lambda: None)
    handle = getattr(linear.weight, register)(lambda _: None)
    with torch.no_grad():
        linear(torch.ones(1, 3))
    with pytest.raises(UsageError, match="expected no gradient hook on the weight of a _Linear, found one"):
        linear(torch.ones(1, 3))
    handle.remove()
    linear(torch.ones(1, 3))


@pytest.mark.parametrize("chunk", [None, Chunk(0, 2)], ids=["whole sequences", "part of a sequence"])
def test_attention_bias_is_for_whole_sequences(monkeypatch, chunk):
    attention, query = _AttentionPerChunk(), torch.ones(2, 1, 1, 3)
    monkeypatch.setattr(attention, "_own_selection", lambda _: nullcontext())
    attention.chunk = chunk
    inputs = query, query, query, None, AttnMaskType.causal
    if chunk is None:
        assert torch.equal(attention(*inputs, attention_bias=1.0), query + 1)
    else:
        with pytest.raises(UsageError, match="expected no attention_bias with sequence chunks or packed documents"):
            attention(*inputs, attention_bias=1.0)
