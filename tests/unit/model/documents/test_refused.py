"""What a model does that is prepared for packed documents, and what it refuses."""

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.features.documents.lengths import Documents
from megatron_lancet.model.chunking import split_hidden
from megatron_lancet.planning.documents.cost import DocumentCost
from megatron_lancet.planning.sizes.attention import tokens_per_pair
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Segment, fixed_plan
from tests.fakes import cpu_stats
from tests.parity.documents.samples import params_of
from tests.small_gpt import EXPERTS, VOCAB, small_gpt, transformer_config

SAMPLES = [[2, 1, 13]]
TOKENS = torch.zeros(1, 16, dtype=torch.long)
PLAN = fixed_plan(1, DwPolicy.NONE)


def prepared(documents=True, model=None, **settings):
    from megatron_lancet.model.gpt import overlap

    model = model or small_gpt(transformer_config(**EXPERTS, **settings), position_embedding_type="rope")
    overlap(model, PLAN, Comm(None, None, cpu_stats(), own_rank=0), documents=documents)
    return model


def test_all_attentions_take_documents_and_cuts_know_their_cost(one_rank):
    model = prepared(mtp_num_layers=1)
    layers = [*model.decoder.layers, model.mtp.layers[0].mtp_model_layer]
    assert {type(layer.self_attention.core_attention).__name__ for layer in layers} == {"SdpaAttention"}
    assert model.decoder.documents.cost == DocumentCost(tokens_per_pair(model.config, VOCAB))
    assert model.mtp.layers[0].documents == model.decoder.documents


def test_rotary_embeddings_of_documents_are_not_fused(one_rank):
    model = small_gpt(transformer_config(**EXPERTS))
    model.config.apply_rope_fusion = True
    prepared(model=model)
    assert model.config.apply_rope_fusion
    assert not any(layer.self_attention.config.apply_rope_fusion for layer in model.decoder.layers)


def test_documents_in_an_unprepared_model_are_refused(one_rank):
    model = prepared(documents=False)
    with pytest.raises(UsageError, match=r"not prepared for documents\. Pass --dataloader-inter-document-masking"):
        model(TOKENS, TOKENS, None, packed_seq_params=params_of(SAMPLES))


@pytest.mark.parametrize("trains", [True, False])
def test_a_mask_beside_documents_is_refused(one_rank, trains):
    model = prepared().train(trains)
    with pytest.raises(UsageError, match="Drop --reset-attention-mask"):
        model(TOKENS, TOKENS, torch.ones(1, 1, 16, 16, dtype=torch.bool), packed_seq_params=params_of(SAMPLES))


def test_attention_without_a_kernel_for_documents_is_refused(one_rank):
    with pytest.raises(UsageError, match="--window-size does not work"):
        prepared(window_size=(4, 0))


def test_te_refuses_sequence_chunks_and_context_parallelism(one_rank):
    model = prepared()
    attention = model.decoder.overlapping_layers[0].attention
    attention._is_te = True
    with pytest.raises(UsageError, match="sequence chunks of packed documents do not work with Transformer Engine"):
        attention.check(cuts_documents=True)
    attention.check(cuts_documents=False)
    attention.begin_documents()
    model.config.context_parallel_size = 2
    with pytest.raises(UsageError, match="and --context-parallel-size 2: it expects each document cut"):
        attention.begin_documents()


def test_predictions_need_a_shift_inside_documents(one_rank):
    model = prepared(mtp_num_layers=1)
    layer, hidden = model.mtp.layers[0], torch.zeros(16, 1, 32)
    with pytest.raises(AssertionError, match="Megatron shifts all samples alike"):
        layer._packed(params_of(SAMPLES), hidden)


@pytest.mark.parametrize(
    ("dim", "size", "message"),
    [(ChunkDim.SEQUENCE, (3, 1, 1), "3 positions, which make no 4 chunks"), (ChunkDim.BATCH, (8, 1, 1), "1 samples")],
)
def test_micro_batches_shorter_than_the_chunks_are_refused(dim, size, message):
    for documents in (None, Documents(((size[0],),), cost=DocumentCost(0.0))):
        with pytest.raises(UsageError, match=message):
            split_hidden(torch.zeros(size), Segment(1, None, 4, dim), documents)


@pytest.mark.parametrize("overlap_range", [OverlapRange.STACK, OverlapRange.GATE])
def test_sequences_are_cut_by_the_cost_of_documents(overlap_range):
    documents = Documents(((90, 10),), cost=DocumentCost(1e3))
    segment = Segment(1, None, 2, ChunkDim.SEQUENCE, overlap_range)
    parts = split_hidden(torch.zeros(100, 1, 1), segment, documents if overlap_range.has_attention else None)
    assert [len(part) for part in parts] == ([64, 36] if overlap_range.has_attention else [50, 50])
