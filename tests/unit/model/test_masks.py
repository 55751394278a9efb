"""Supported attention masks; a mask is checked once."""

from dataclasses import replace

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.model.attention import masks
from megatron_lancet.patching import replaced
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, fixed_plan
from tests.fakes import cpu_stats
from tests.small_gpt import EXPERTS, SEQ_LENGTH, small_gpt, transformer_config

BATCH = fixed_plan(2, DwPolicy.NONE)
SEQUENCE = fixed_plan(2, DwPolicy.NONE, ChunkDim.SEQUENCE)
AFTER_ATTENTION = fixed_plan(2, DwPolicy.NONE, ChunkDim.SEQUENCE, OverlapRange.GATE)
TOKENS = torch.zeros(2, SEQ_LENGTH, dtype=torch.long)
CAUSAL = ~torch.ones(SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).tril()[None, None]
UNREADABLE = CAUSAL.to("meta")
"""A tensor without readable values."""


def prepared(plan, sdpa=False, mask_type=None, **settings):
    from megatron_lancet.model.gpt import overlap

    model = small_gpt(transformer_config(**EXPERTS, **settings), position_embedding_type="rope")
    if mask_type is not None:
        model.decoder.layers[1].self_attention.attn_mask_type = mask_type
    overlap(model, plan, Comm(None, None, cpu_stats(), own_rank=0), sdpa=sdpa)
    return model


def look(model, mask, checked=frozenset()):
    segments = [(one.segment, layer.stock) for one in model.decoder.segments for layer in one.layers.values()]
    return masks.look_once(mask, checked, segments, SEQ_LENGTH)


def changed(sample: int, query: int, key: int) -> torch.Tensor:
    mask = CAUSAL.repeat(2, 1, 1, 1)
    mask[sample, 0, query, key] ^= True
    return mask


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        (changed(1, 5, 2), "forbids position 5 of sample 1 to attend to position 2"),
        (changed(0, 5, 9), "allows position 5 of sample 0 to attend to position 9"),
        (torch.zeros_like(CAUSAL), "allows position 0 of sample 0 to attend to position 1"),
        (CAUSAL.float(), r"is torch\.float32 \[1, 1, 16, 16\], not torch\.bool"),
        (torch.zeros(2, 1, 1, SEQ_LENGTH, dtype=torch.bool), r"is torch\.bool \[2, 1, 1, 16\], not"),
    ],
    ids=["document", "later", "bidirectional", "float", "padding"],
)
def test_model_refuses_masks_that_sequence_chunks_ignore(one_rank, mask, found):
    message = rf"^sequence chunks attend to all .* {found}.*Pass the causal mask or None, .* --lancet-chunk-dim batch"
    with pytest.raises(UsageError, match=message), replaced(masks, "_PIECE", 100):
        prepared(SEQUENCE)(TOKENS, TOKENS, mask)


def test_predictions_refuse_it_as_well(one_rank):
    """Prediction layers may be the only layers of a stage."""
    model = prepared(SEQUENCE, mtp_num_layers=1)
    hidden = torch.zeros(SEQ_LENGTH, 2, model.config.hidden_size)
    prediction = model.mtp.layers[0]
    prediction.begin_micro_batch()
    with pytest.raises(UsageError, match="forbids position 5 of sample 1"):
        prediction._proj_and_transformer_layer(hidden, hidden, changed(1, 5, 2))


@pytest.mark.parametrize("mask", [CAUSAL, CAUSAL.expand(2, 1, -1, -1), CAUSAL[0, 0]])
def test_the_causal_mask_is_looked_at_once(one_rank, mask):
    model = prepared(SEQUENCE)
    checked = look(model, mask)
    assert checked == {masks.MaskLimit.CAUSAL}
    assert look(model, UNREADABLE, checked) == checked
    assert look(model, None) == frozenset()
    with pytest.raises(RuntimeError, match="meta"):
        look(model, UNREADABLE)


@pytest.mark.parametrize(
    ("plan", "sdpa"), [(BATCH, False), (BATCH, True), (AFTER_ATTENTION, True), (fixed_plan(1, DwPolicy.NONE), True)]
)
def test_a_mask_that_attention_reads_is_not_looked_at(one_rank, plan, sdpa):
    assert look(prepared(plan, sdpa=sdpa), UNREADABLE) == frozenset()


@pytest.mark.parametrize(
    ("mask", "found"), [(changed(0, 7, 1), None), (changed(1, 7, 12), "7 of sample 1 to attend to position 12")]
)
def test_slices_of_a_context_parallel_rank_see_no_later_position(one_rank, monkeypatch, mask, found):
    own = [(4, 8), (8, 12)]
    monkeypatch.setattr(masks, "own_positions", lambda num_positions, config: own)
    model = prepared(fixed_plan(1, DwPolicy.NONE), sdpa=True)
    model.decoder.layers[0].self_attention.core_attention.config.context_parallel_size = 2
    rows = torch.cat([mask[:, :, start:stop] for start, stop in own], dim=2)
    segments = [(model.decoder.segments[0].segment, model.decoder.layers[0])]

    def look_at_rows():
        return masks.look_once(rows, frozenset(), segments, SEQ_LENGTH // 2)

    if found is None:
        assert look_at_rows() == {masks.MaskLimit.NO_LATER}
    else:
        with pytest.raises(UsageError, match=rf"with --context-parallel-size attend to no later .* {found}"):
            look_at_rows()


@pytest.mark.parametrize(("plan", "sdpa"), [(SEQUENCE, False), (BATCH, True)])
def test_other_mask_types_are_refused_by_causal_kernels(one_rank, plan, sdpa):
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_lancet.model.gpt import set_plan

    for mask_type in (AttnMaskType.no_mask, AttnMaskType.padding, AttnMaskType.padding_causal):
        with pytest.raises(UsageError, match=rf"model spec builds layer 2 with AttnMaskType\.{mask_type.name}\. Set"):
            prepared(plan, sdpa, mask_type)
    model = prepared(BATCH, False, AttnMaskType.no_mask)
    with pytest.raises(UsageError, match=r"layer 2 with AttnMaskType\.no_mask"):
        set_plan(model, replace(SEQUENCE, dw_window=0))
    assert [one.segment for one in model.decoder.segments] == list(BATCH.segments)
