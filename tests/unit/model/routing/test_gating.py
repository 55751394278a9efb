"""The gradient input of Transformer Engine's GEMM in the gating: the GEMM reads by address, without strides."""

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

from megatron_lancet.model.adopt import adopt
from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.routing.router import ChunkedTopKRouter
from tests.small_gpt import EXPERTS, transformer_config

TOKENS, SAMPLES, HIDDEN, NUM_EXPERTS = 6, 4, 32, 8


def gemm(left, right, dtype, layout="TN", bias=None, grad=False):
    """Implements the part of Transformer Engine's GEMM that the gating uses."""
    assert right.is_contiguous(), f"strides {right.stride()} would be ignored"
    if layout == "TN":
        return [right.to(dtype) @ left.to(dtype).t()]
    return [right @ left if layout == "NN" else right.t() @ left]


def backward(make, monkeypatch, **chunk):
    monkeypatch.setattr(moe_utils, "te_general_gemm", gemm)
    torch.manual_seed(3)
    router = make()
    hidden = torch.randn(TOKENS, SAMPLES, HIDDEN, requires_grad=True)
    probs, _ = router(hidden, **chunk)
    # Megatron's permutation without fusion takes the transposed probabilities.
    probs.T.contiguous().square().sum().backward()
    return hidden.grad


@pytest.fixture
def config(one_rank):
    settings = {"num_moe_experts": NUM_EXPERTS, "moe_router_topk": 1, "moe_aux_loss_coeff": 0.0}
    return transformer_config(**{**EXPERTS, **settings, "moe_router_load_balancing_type": "sinkhorn"})


def test_gating_with_sinkhorn_gets_a_contiguous_gradient(config, monkeypatch):
    def ours():
        router = adopt(TopKRouter(config, moe_utils.get_default_pg_collection()), ChunkedTopKRouter)
        router.begin_micro_batch()
        return router

    assert backward(ours, monkeypatch, chunk=Chunk(0, 1)).abs().sum() > 0


def test_stock_hands_the_gemm_a_transposed_gradient(config, monkeypatch):
    """If this fails, Megatron has changed, and the router may use stock's ``gating``."""
    with pytest.raises(AssertionError, match="would be ignored"):
        backward(lambda: TopKRouter(config, moe_utils.get_default_pg_collection()), monkeypatch)
