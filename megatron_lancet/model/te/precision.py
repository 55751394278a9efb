"""Megatron's fp8 and fp4 contexts around the ops of a chunk.

Entering one sets global state of Transformer Engine, so none is open while ops of other layers or chunks run.
"""

from contextlib import AbstractContextManager, nullcontext

from megatron.core.enums import Fp8Recipe
from megatron.core.fp4_utils import get_fp4_context
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.transformer import TransformerConfig


def block_precision(config: TransformerConfig) -> AbstractContextManager[None]:
    """The context around all layers of a block and all their chunks.

    Delayed scaling needs it: it updates its scales when the outermost context ends, so once in a micro-batch. The other
    recipes have a context for each op.
    """
    return get_fp8_context(config) if config.fp8 and config.fp8_recipe == Fp8Recipe.delayed else nullcontext()


def op_precision(config: TransformerConfig, layer_number: int) -> AbstractContextManager[None]:
    """The context around one op of a layer.

    Args:
        layer_number: Megatron's global layer number, from 1; the first and the last layers may run in bf16.
    """
    if config.fp8 and config.fp8_recipe != Fp8Recipe.delayed:
        return get_fp8_context(config, layer_number - 1)
    return get_fp4_context(config, layer_number - 1) if config.fp4 else nullcontext()
