"""Padding in routers: counts and refusals. Other tests compare losses and gradients with stock."""

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.features.documents.lengths import Documents
from megatron_lancet.features.documents.packed import PackedMicroBatch
from megatron_lancet.model.adopt import adopt
from megatron_lancet.model.chunking import Chunk, make_chunks, split_hidden
from megatron_lancet.model.routing.padding import padding_of
from megatron_lancet.model.routing.router import ChunkedTopKRouter
from megatron_lancet.schedule.plan import ChunkDim, Segment
from tests.small_gpt import EXPERTS, transformer_config

NUM_EXPERTS, HIDDEN, POSITIONS, SAMPLES = 8, 32, 6, 4
PADDING = torch.rand(POSITIONS, SAMPLES, generator=torch.Generator().manual_seed(2)) < 0.4
WHOLE = Chunk(0, 1, padding_mask=PADDING)


@pytest.fixture
def router(one_rank):
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler, TopKRouter

    def make(**settings):
        torch.manual_seed(3)
        config = transformer_config(**{**EXPERTS, "num_moe_experts": NUM_EXPERTS, **settings})
        made = adopt(TopKRouter(config, get_default_pg_collection()), ChunkedTopKRouter)
        made.set_layer_number(1)
        made.begin_micro_batch()
        return made

    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    return make


def hidden_states():
    return torch.randn(POSITIONS, SAMPLES, HIDDEN, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(
    "segment",
    [Segment(1, None, 1), Segment(1, None, 3), Segment(1, None, 4, ChunkDim.SEQUENCE)],
    ids=["whole", "batch", "sequence"],
)
def test_experts_counts_leave_padding_out(router, segment):
    """Stock fails: it combines [T, E] with [T]."""
    made = router(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    parts = split_hidden(hidden_states(), segment)
    expected = torch.zeros(NUM_EXPERTS)
    for part, chunk in zip(parts, make_chunks(parts, segment, WHOLE), strict=True):
        _, routing_map = made(part, chunk=chunk)
        expected += routing_map[~chunk.padding_mask.reshape(-1)].sum(0)
    assert expected.sum() == 2 * (~PADDING).sum()
    assert made.local_tokens_per_expert.equal(expected)


def test_the_balancing_loss_of_documents_with_padding_is_refused(router):
    made = router(moe_router_load_balancing_type="seq_aux_loss")
    made.begin_micro_batch(Documents(((2, 4),) * SAMPLES, are_sequences=True))
    with pytest.raises(UsageError, match=r"seq_aux_loss of documents does not work with a padding_mask: .* Drop"):
        made(hidden_states(), chunk=WHOLE)


def test_a_mask_of_other_tokens_is_refused():
    hidden = hidden_states()
    assert padding_of(None, hidden, None) is None
    assert padding_of(PADDING.T.float(), hidden, None).equal(PADDING)
    for wrong in (PADDING, PADDING.T[:, :3], PADDING.T.reshape(1, -1)):
        with pytest.raises(UsageError, match=r"this rank has 4 samples of 6 positions\. Pass a mask of shape \[4, 6\]"):
            padding_of(wrong, hidden, None)


def test_a_mask_of_samples_laid_end_to_end_is_taken_apart():
    packed = PackedMicroBatch(Documents(((6,),) * SAMPLES), torch.zeros(0), is_flat=True)
    assert padding_of(PADDING.T.reshape(1, -1), hidden_states(), packed).equal(PADDING)
