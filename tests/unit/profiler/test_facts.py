"""Sizes of rows that the planner knows without torch."""

import dataclasses

import pytest
import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron_lancet.profiler.facts import _SETTINGS, _changed
from megatron_lancet.runtime.rows.packing import RowLayout
from tests.unit.profiler.synthetic import FACTS


@pytest.mark.parametrize(
    ("hidden", "dtype", "num_local", "prob_dtype"),
    [
        (32, torch.float32, 2, torch.float32),
        (12, torch.bfloat16, 9, torch.bfloat16),
        (6, torch.float32, 16, torch.float64),
    ],
)
def test_bytes_of_a_deduplicated_row_are_those_of_a_packed_one(hidden, dtype, num_local, prob_dtype):
    row = torch.empty(1, hidden, dtype=dtype)
    choice = torch.empty(1, num_local + -(-num_local // 8), dtype=prob_dtype)
    packed = RowLayout.of((row, choice)).pack((row, choice))
    row_bytes = row.nbytes
    facts = dataclasses.replace(
        FACTS,
        num_experts=2 * num_local,
        combine_row_bytes=row_bytes,
        prob_bytes=prob_dtype.itemsize,
    )
    assert facts.row_bytes_to(facts.ep_size) == packed.nbytes


def test_models_of_other_settings_have_other_names():
    """A kept profile is found by the name: other sizes of latent attention take other times."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    assert list(_changed(TransformerConfig(**sizes))) == []
    small, large = (MLATransformerConfig(**sizes, kv_lora_rank=rank) for rank in (256, 512))
    assert (list(_changed(small)), list(_changed(large))) == (["kv_lora_rank=256"], [])
    known = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert set(_SETTINGS) <= known
