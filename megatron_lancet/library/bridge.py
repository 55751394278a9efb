"""The overlap in Megatron-Bridge's own training loop."""

from typing import Any

from megatron_lancet.errors import UsageError
from megatron_lancet.library.overlap import Overlap
from megatron_lancet.model.linear import DeferredColumnParallelLinear, DeferredRowParallelLinear
from megatron_lancet.model.routing.router import ChunkedTopKRouter

_MODULE_TYPES = {
    "column": (
        DeferredColumnParallelLinear.__name__,
        "TEColumnParallelLinearPerChunk",
        "TELayerNormColumnParallelLinearPerChunk",
        "TELMHeadColumnParallelLinearPerChunk",
        "TEColumnParallelGroupedLinearPerChunk",
        "TEDotProductAttentionPerChunk",  # for attention sinks only
    ),
    "row": (
        DeferredRowParallelLinear.__name__,
        "TERowParallelLinearPerChunk",
        "TERowParallelGroupedLinearPerChunk",
    ),
    "replicated": (ChunkedTopKRouter.__name__, "TELinearPerChunk"),
}
"""How the weights of the plan's classes are spread over tensor-parallel ranks, in Bridge's words. Transformer Engine's
classes are made when a model needs them, so they have names only."""


def register_module_types() -> None:
    """Tells Bridge's conversion to Hugging Face how weights of a model that runs a plan are spread over ranks.

    Bridge asks for it by the names of classes. Call it before an export; :func:`enable` does.

    Raises:
        UsageError: Bridge is not installed.
    """
    try:
        from megatron.bridge.models.conversion.param_mapping import AutoMapping
    except ImportError as error:
        raise _no_bridge(error) from error
    for kind, names in _MODULE_TYPES.items():
        for name in names:
            AutoMapping.register_module_type(name, kind)


def _no_bridge(error: ImportError) -> UsageError:
    return UsageError(f"expected Megatron-Bridge, found none ({error}). Install megatron-bridge.")


def enable(config: Any, **settings: Any) -> list[Any]:
    """Lets the model of a ``ConfigContainer`` run by a plan.

    ::

        pretrain(config, forward_step, callbacks=enable(config))

    Args:
        config: Bridge's configuration, before ``pretrain`` or ``finetune`` gets it.
        settings: see :class:`~megatron_lancet.library.overlap.Overlap`.

    Returns:
        Callbacks for ``pretrain`` or ``finetune``, which print the report at the end.

    Raises:
        UsageError: Bridge is not installed, a setting is unknown or wrong, or the configuration has adapters
            (``config.peft``), which Bridge puts around modules later than this.
    """
    try:
        from megatron.bridge.training.callbacks import Callback
    except ImportError as error:
        raise _no_bridge(error) from error
    if config.peft is not None:
        raise UsageError(
            "the overlap does not work with adapters (config.peft): Bridge wraps linear layers that the overlap has "
            "replaced. Train all weights, or leave enable() out."
        )
    register_module_types()
    overlap = Overlap(
        config.ddp,
        micro_batch_size=config.train.micro_batch_size,
        seq_length=config.model.seq_length,
        num_steps=config.train.train_iters,
        **settings,
    )
    config.model.register_pre_wrap_hook(overlap)

    class Closing(Callback):
        """Ends the overlap with the training, while process groups are still there."""

        def on_train_end(self, context: Any) -> None:
            overlap.close()

    return [Closing()]
