"""The overlap in Megatron-Bridge's own training loop."""

from collections.abc import Callable
from typing import Any, cast

from megatron_lancet.errors import UsageError
from megatron_lancet.library.overlap import Overlap


def enable(config: Any, **settings: Any) -> list[Any]:
    """Lets the model of a ``ConfigContainer`` run by a plan.

    ::

        pretrain(config, forward_step, callbacks=enable(config))

    The hook runs behind all others, which load weights or put adapters (``config.peft``) around linear layers.

    Args:
        config: Bridge's configuration, before ``pretrain`` or ``finetune`` gets it.
        settings: see :class:`~megatron_lancet.library.overlap.Overlap`; they go before the values of ``config``.

    Returns:
        Callbacks for ``pretrain`` or ``finetune``, which print the report at the end.

    Raises:
        UsageError: Bridge is not installed, or a setting is unknown or wrong.
    """
    try:
        from megatron.bridge.training.callbacks import Callback
    except ImportError as error:
        raise UsageError(f"expected Megatron-Bridge, found none ({error}). Install megatron-bridge.") from error
    data = config.dataset
    known = {
        "micro_batch_size": config.train.micro_batch_size,
        "seq_length": config.model.seq_length,
        "num_steps": config.train.train_iters,
        "packed_samples": any(getattr(data, f"enable_{way}_packing", False) for way in ("offline", "in_batch")),
    }
    overlap = Overlap(config.ddp, **{**known, **settings})
    add_hook = _hooks_of(config.model)

    def add_last(stages: list[Any]) -> list[Any]:
        add_hook(overlap)  # Bridge has added its own hooks by now, and runs them in order
        return stages

    add_hook(add_last)

    class Closing(Callback):
        """Ends the overlap with the training, while process groups are still there."""

        def on_train_start(self, context: Any) -> None:
            if not overlap.line:
                raise UsageError(
                    "expected a model that was built from the configuration which enable() got, found another one. "
                    "Call enable() with the configuration of this training."
                )

        def on_train_end(self, context: Any) -> None:
            overlap.close()

    return [Closing()]


def _hooks_of(model_config: Any) -> Callable[[Any], None]:
    """Returns the function that adds a hook; Bridge has two kinds of model configurations."""
    if hasattr(model_config, "pre_wrap_hooks"):
        return cast(Callable[[Any], None], model_config.pre_wrap_hooks.append)
    return cast(Callable[[Any], None], model_config.register_pre_wrap_hook)
