"""Number of tokens that fp8 and fp4 GEMMs want in a chunk."""

import argparse

from megatron.core.enums import Fp8Recipe
from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.transformer import TransformerConfig

_BLOCK = 128
"""Tokens of a block that has one scale, with the recipe ``blockwise``."""


def token_multiple(settings: argparse.Namespace | TransformerConfig) -> int:
    """Number that the tokens of each chunk are a multiple of; 1 without fp8 and fp4.

    The rows of the routed experts do not count: Megatron pads them in each call.

    Args:
        settings: Megatron's arguments, or the configuration that is made of them.
    """
    multiple = _rows(settings)
    if multiple > 1 and settings.sequence_parallel and settings.multi_latent_attention:
        # Its down projections work on a tensor-parallel rank's part of the sequence, the other linears on all of it.
        multiple *= settings.tensor_model_parallel_size
    return multiple


def _rows(settings: argparse.Namespace | TransformerConfig) -> int:
    """Number that the rows of a quantized linear's input are a multiple of.

    Transformer Engine checks the forward pass for a multiple of 8. In dW's GEMM the rows are the leading dimension,
    of which cuBLAS wants 16 bytes, so Megatron pads to 16 rows, and to 32 with MXFP8.
    """
    if settings.fp4:
        return int(get_fp4_align_size(settings.fp4_recipe))
    if not settings.fp8:
        return 1
    if settings.fp8_recipe in (Fp8Recipe.blockwise, Fp8Recipe.custom):
        return _BLOCK  # a custom recipe may have blocks too
    return int(get_fp8_align_size(settings.fp8_recipe))
