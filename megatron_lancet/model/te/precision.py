"""Megatron's fp8 and fp4 contexts around the ops of a chunk.

Entering one sets global state of Transformer Engine, so none is open while ops of other layers or chunks run.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fp4_utils import get_fp4_context
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer


def block_precision(config: TransformerConfig) -> AbstractContextManager[None]:
    """The context around all layers of a block and all their chunks.

    Delayed scaling needs it: it updates its scales when the outermost context ends, so once in a micro-batch. The other
    recipes have a context for each op.
    """
    return get_fp8_context(config) if config.fp8 and config.fp8_recipe == Fp8Recipe.delayed else nullcontext()


def op_precision(layer: TransformerLayer | MoELayer) -> AbstractContextManager[None]:
    """The context around one op of a layer.

    The first and the last layers may run in bf16. As in stock, multi-token predictions do not count among them, and
    have no fp4.
    """
    config = layer.config
    if layer.is_mtp_layer:
        return get_fp8_context(config) if config.fp8 and config.fp8_recipe != Fp8Recipe.delayed else nullcontext()
    layer_number = layer.layer_number
    if config.fp8 and config.fp8_recipe != Fp8Recipe.delayed:
        return get_fp8_context(config, layer_number - 1)
    return get_fp4_context(config, layer_number - 1) if config.fp4 else nullcontext()


def recompute_precision() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of what is recomputed: around its first run, and around the second one, in the backward pass.

    The second run is outside of the context that is open now. With delayed scaling Transformer Engine's modules put
    their scales and amax histories aside in the first run. In the second run they quantize with those scales, and leave
    the histories as they were.
    """
    if not HAVE_TE:
        return nullcontext(), nullcontext()
    from transformer_engine.pytorch.distributed import get_activation_recompute_contexts
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    if not FP8GlobalStateManager.is_fp8_enabled():
        return nullcontext(), nullcontext()
    recipe, group = FP8GlobalStateManager.get_fp8_recipe(), FP8GlobalStateManager.get_fp8_group()
    first, second = get_activation_recompute_contexts() if recipe.delayed() else (nullcontext(), nullcontext())
    return first, _second_run(second, recipe, group)


@contextmanager
def _second_run(phase: AbstractContextManager[None], recipe: Any, group: Any) -> Iterator[None]:
    from transformer_engine.pytorch import fp8_autocast

    # A context that ends while gradients are enabled reduces the maxima over ranks and updates all scales. It also puts
    # back which module is the first of a micro-batch, which ``phase`` overwrites: a forward may be under way during the
    # backward, and two first modules would update the scales of its backward twice.
    with torch.no_grad(), fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group), phase, torch.enable_grad():
        yield
