"""What a plan decides in a model, put in place and taken back between steps."""

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from megatron_lancet import registry
from megatron_lancet.errors import UsageError
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.model.attention.switchable import SwitchableAttention
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, Segment, fixed_plan
from tests.fakes import cpu_stats
from tests.small_gpt import EXPERTS, small_gpt, transformer_config

WHOLE = fixed_plan(1, DwPolicy.NONE)
SEQUENCE = fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE)
MIXED = Plan((Segment(1, 1, 1), Segment(2, 2, 2, ChunkDim.SEQUENCE), Segment(3, 3, 3)), dw_window=4)


def build(**settings):
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return small_gpt(transformer_config(**{**EXPERTS, **recomputed, **settings}))


def prepared(plan: Plan, sdpa: bool = False, **settings):
    """A model, and its store."""
    from megatron_lancet.model.gpt import overlap

    model, stats = build(**settings), cpu_stats()
    store = WeightGradStore.of(plan, stats)
    overlap(model, plan, Comm(None, store, stats, own_rank=0), sdpa)
    return model, store


def decided(model) -> list[tuple[str, bool, bool, bool]]:
    """Per layer: core attention's class, whether Megatron recomputes it, experts grouped, dW added in its GEMM."""
    return [
        (
            type(layer.self_attention.core_attention).__name__,
            layer.self_attention.checkpoint_core_attention,
            layer.mlp.experts.may_group,
            layer.self_attention.linear_qkv.accumulate_in_gemm,
        )
        for layer in model.decoder.layers
    ]


STOCK = ("RecomputedAttention", False, False, False)
BATCH = ("RecomputedAttention", False, True, True)
FUSED = ("SdpaAttention", False, True, True)


def test_layers_follow_their_segments_and_are_restored(one_rank):
    from megatron_lancet.model.gpt import set_plan

    model, store = prepared(WHOLE)
    assert decided(model) == [STOCK] * 3
    for plan, expected, output_layer in (
        (SEQUENCE, [FUSED] * 3, True),
        (MIXED, [STOCK, FUSED, BATCH], True),
        (fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE, overlap_range=OverlapRange.GATE), [BATCH] * 3, True),
        (WHOLE, [STOCK] * 3, False),
    ):
        set_plan(model, plan)
        assert decided(model) == expected
        assert model.output_layer.accumulate_in_gemm == output_layer
        owned = [list(forward.layers) for forward in model.decoder.segments]
        assert owned == ([[1], [2], [3]] if plan is MIXED else [[1, 2, 3]])
    store.assert_idle()


def test_fused_attention_is_kept_where_requested(one_rank):
    from megatron_lancet.model.gpt import set_plan

    model, _ = prepared(SEQUENCE, sdpa=True)
    set_plan(model, WHOLE)
    assert [kind for kind, *_ in decided(model)] == ["SdpaAttention"] * 3


def test_pipeline_stage_runs_its_own_segments(one_rank):
    from megatron_lancet.model.gpt import set_plan

    model, _ = prepared(WHOLE)
    # The second of two pipeline stages.
    model.decoder.overlapping_layers = [layer.numbered(layer.number + 3) for layer in model.decoder.overlapping_layers]
    model.config.num_layers = 6
    set_plan(model, Plan((Segment(1, 2, 4), Segment(3, 4, 2), Segment(5, 6, 1)), dw_window=4))
    owned = [(forward.segment.num_chunks, list(forward.layers)) for forward in model.decoder.segments]
    assert owned == [(2, [4]), (1, [5, 6])]
    assert decided(model) == [BATCH, STOCK, STOCK]


@pytest.mark.parametrize(
    ("plan", "settings", "message"),
    [
        (Plan((Segment(1, 4, 2),), dw_window=4), {}, "of a model with 4 layers, and this one has 3"),
        (Plan((Segment(1, 2, 2),), dw_window=4), {}, "of a model with 2 layers, and this one has 3"),
        (Plan((Segment(1, 4, 2), Segment(5, None, 2)), dw_window=4), {}, "with at least 5 layers"),
        (SEQUENCE, {"window_size": (4, 0)}, "--window-size does not work with sequence chunks"),
    ],
)
def test_plan_that_does_not_fit_is_refused_and_changes_nothing(one_rank, plan, settings, message):
    from megatron_lancet.model.gpt import set_plan

    model, _ = prepared(WHOLE, **settings)
    with pytest.raises(UsageError, match=message):
        set_plan(model, plan)
    assert decided(model) == [STOCK] * 3
    assert [forward.segment for forward in model.decoder.segments] == list(WHOLE.segments)


@pytest.mark.parametrize(("settings", "bound"), [({"fp8": "hybrid"}, None), ({}, 64)])
def test_unsupported_tiles_are_refused_and_change_nothing(one_rank, settings, bound):
    from megatron_lancet.model.gpt import set_plan

    model, _ = prepared(WHOLE)
    comm = model.decoder.comm
    comm.use(replace(comm.settings, max_expert_rows=bound))
    vars(model.config).update(settings)
    with pytest.raises(UsageError, match=r"cannot run a tiled plan: .* without tiles"):
        set_plan(model, fixed_plan(1, tiles=2))
    assert decided(model) == [STOCK] * 3
    assert [forward.segment for forward in model.decoder.segments] == list(WHOLE.segments)


@pytest.mark.parametrize(
    ("folder", "plan"), [("tiles", fixed_plan(1, tiles=2)), ("two_hop", fixed_plan(1, dispatch=TWO_HOP))]
)
def test_model_without_a_plans_part_refuses_it(one_rank, monkeypatch, folder, plan):
    from megatron_lancet.model.gpt import set_plan

    lines = [line for line in registry._MODEL_PARTS if f".features.{folder}." not in line]
    monkeypatch.setattr(registry, "_MODEL_PARTS", lines)
    registry.model_parts.cache_clear()
    try:
        model, _ = prepared(WHOLE)
        with pytest.raises(UsageError, match=r"can't run a plan with dispatch=.* lacks its folder of features/"):
            set_plan(model, plan)
        assert [forward.segment for forward in model.decoder.segments] == list(WHOLE.segments)
    finally:
        registry.model_parts.cache_clear()


def test_dws_of_tiles_are_gathered_where_none_is_deferred(one_rank):
    from megatron_lancet.features.row_bound.feature import limit_rows
    from megatron_lancet.training.overlap_setup import OverlapSetup

    cpu = torch.device("cpu")
    plan = fixed_plan(1, DwPolicy.NONE, tiles=2)
    setup = OverlapSetup(plan, cpu, cpu_stats(), timedelta(minutes=1))
    assert setup.delays_weight_grads
    setup([build()])
    with pytest.raises(UsageError, match="--lancet-max-expert-rows"):
        limit_rows(setup, 64)
    assert setup.stages[0].decoder.comm.settings.max_expert_rows is None


def test_model_without_deferral_refuses_a_deferring_plan(one_rank):
    from megatron_lancet.model.gpt import overlap, set_plan

    model, stats = build(), cpu_stats()
    overlap(model, WHOLE, Comm(None, None, stats, own_rank=0))
    set_plan(model, fixed_plan(2, DwPolicy.NONE))
    with pytest.raises(AssertionError, match="without a store"):
        set_plan(model, fixed_plan(2))


def test_setup_that_is_not_switchable_refuses_another_plan(one_rank):
    from megatron_lancet.training.overlap_setup import OverlapSetup

    cpu = torch.device("cpu")
    fixed, switchable = (
        OverlapSetup(WHOLE, cpu, cpu_stats(), timedelta(minutes=1), switchable=can) for can in (False, True)
    )
    assert (fixed.delays_weight_grads, switchable.delays_weight_grads) == (False, True)
    fixed([build()])
    with pytest.raises(AssertionError, match="must be prepared before DDP wraps it"):
        fixed.switch(SEQUENCE)
    with pytest.raises(AssertionError, match="not built yet"):
        switchable.switch(SEQUENCE)
    model = build()
    switchable([model])
    with pytest.raises(UsageError, match="this one has 3"):
        switchable.switch(Plan((Segment(1, 4, 2),), dw_window=4))
    assert switchable.plan is WHOLE
    switchable.switch(SEQUENCE)
    assert switchable.plan is SEQUENCE
    assert decided(model) == [FUSED] * 3


@pytest.mark.parametrize("name", ["fp8_dot_product_attention", "fp8_multi_head_attention"])
def test_sequence_chunks_refuse_attention_in_fp8(name):
    """Transformer Engine has no kernel for it whose mask is aligned to the last position."""
    attention = object.__new__(SwitchableAttention)
    settings = {"fp8_dot_product_attention": False, "fp8_multi_head_attention": False, name: True}
    attention._is_te, attention._attention = True, SimpleNamespace(config=SimpleNamespace(**settings))
    with pytest.raises(UsageError, match=r"do not work with attention in fp8 .* Pass --lancet-chunk-dim batch"):
        attention.check(cuts_documents=False)
