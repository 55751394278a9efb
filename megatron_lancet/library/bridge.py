"""The overlap in Megatron-Bridge's own training loop."""

from typing import Any

from megatron_lancet.errors import UsageError
from megatron_lancet.library.overlap import Overlap


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
        raise UsageError(f"expected Megatron-Bridge, found none ({error}). Install megatron-bridge.") from error
    if config.peft is not None:
        raise UsageError(
            "the overlap does not work with adapters (config.peft): Bridge wraps linear layers that the overlap has "
            "replaced. Train all weights, or leave enable() out."
        )
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
