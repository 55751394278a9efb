"""The number of tokens that a recipe wants in a chunk."""

from types import SimpleNamespace

import pytest

from megatron_lancet.model.te.token_multiple import token_multiple

BF16 = {
    "fp8": None,
    "fp8_recipe": "delayed",
    "fp4": None,
    "fp4_recipe": "nvfp4",
    "sequence_parallel": False,
    "multi_latent_attention": False,
    "tensor_model_parallel_size": 4,
}


@pytest.mark.parametrize(
    ("changes", "multiple"),
    [
        ({}, 1),
        ({"sequence_parallel": True, "multi_latent_attention": True}, 1),
        ({"fp8": "hybrid"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "tensorwise"}, 16),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, 32),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, 128),
        ({"fp4": "e2m1"}, 128),
        ({"fp8": "hybrid", "sequence_parallel": True}, 16),  # linears gather the sequence
        ({"fp8": "hybrid", "multi_latent_attention": True}, 16),
        ({"fp8": "hybrid", "sequence_parallel": True, "multi_latent_attention": True}, 4 * 16),
    ],
)
def test_token_multiple_of_a_recipe(changes, multiple):
    assert token_multiple(SimpleNamespace(**{**BF16, **changes})) == multiple
