"""The overlap in Megatron-Bridge's own training loop."""

from typing import Any

from megatron_lancet.errors import UsageError
from megatron_lancet.library.overlap import Overlap
from megatron_lancet.patching import around, raised_by


def enable(config: Any, **settings: Any) -> list[Any]:
    """Lets the model of a ``ConfigContainer`` run by a plan, in the next training by this configuration.

    ::

        pretrain(config, forward_step, callbacks=enable(config))

    A hook of the configuration runs behind all others, which load weights or put adapters (``config.peft``) around
    linear layers. When a training that has built its model ends or fails, the configuration is without it.

    Args:
        config: Bridge's configuration, before ``pretrain`` or ``finetune`` gets it.
        settings: see :class:`~megatron_lancet.library.overlap.Overlap`; they go before the values of ``config``.

    Returns:
        Callbacks for ``pretrain`` or ``finetune``. The report is printed at the end, also when one of Bridge's exit
        conditions ends the training.

    Raises:
        UsageError: Bridge is not installed, a setting is unknown or wrong, or Bridge may restart the training.
    """
    try:
        from megatron.bridge.training.callbacks import Callback
    except ImportError as error:
        raise UsageError(f"expected Megatron-Bridge, found none ({error}). Install megatron-bridge.") from error
    if getattr(getattr(config, "inprocess_restart", None), "enabled", False):
        raise UsageError(
            "expected a training that does not restart, found config.inprocess_restart: the overlap prepares the model "
            "of the first start only. Set config.inprocess_restart to None, or leave out enable()."
        )
    data = config.dataset
    known = {
        "micro_batch_size": config.train.micro_batch_size,
        "seq_length": config.model.seq_length,
        "num_steps": config.train.train_iters,
        "packed_samples": any(getattr(data, f"enable_{way}_packing", False) for way in ("offline", "in_batch")),
    }
    overlap = Overlap(config.ddp, **{**known, **settings})
    _remove_hook(config.model)  # of a training that has built no model
    _hooks_of(config.model).append(_Hook(overlap, config.model))

    class Closing(Callback):
        """Tells the overlap where the training begins, and ends it while process groups are still there."""

        def on_train_start(self, context: Any) -> None:
            if not overlap.line:
                raise UsageError(
                    "expected a model that was built from the configuration which enable() got, found another one. "
                    "Call enable() with the configuration of this training."
                )
            args = overlap._facts.args
            args.curr_iteration, args.exit_interval = context.state.train_state.step, config.train.exit_interval

        def on_train_end(self, context: Any) -> None:
            overlap.close()

    return [Closing()]


class _Hook:
    """The hook of a configuration. It gives the model to the overlap, which ends with this training."""

    def __init__(self, overlap: Overlap, model_config: Any) -> None:
        self._overlap, self._model_config = overlap, model_config

    def __call__(self, stages: list[Any]) -> list[Any]:
        hooks = _hooks_of(self._model_config)
        if hooks[-1] is not self:
            hooks.append(self)  # Bridge has added its own hooks by now, and runs them in order
            return stages
        from megatron.bridge.training import pretrain

        changes = self._overlap.changes
        changes.callback(_remove_hook, self._model_config)
        changes.enter_context(around(pretrain, "train", self._train))
        changes.enter_context(around(pretrain, "_maybe_destroy_process_group", self._end))
        return self._overlap(stages)

    def _train(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        """Bridge's training loop. An exit condition ends it by SystemExit with a status, and no callback is called.

        A step may also exit, perhaps on this rank alone: then there is no report, which all ranks send together.
        """
        try:
            return stock(*args, **kwargs)
        except SystemExit as request:
            if request.code is not None and raised_by(request, stock):
                self._overlap.close()
            raise

    def _end(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        """The last call of each training by Bridge, which has failed where the overlap is still open."""
        self._overlap.changes.close()
        return stock(*args, **kwargs)


def _hooks_of(model_config: Any) -> list[Any]:
    """The hooks of a model's configuration, of which Bridge has two kinds."""
    if hasattr(model_config, "pre_wrap_hooks"):
        hooks: list[Any] = model_config.pre_wrap_hooks
        return hooks
    return vars(model_config).setdefault("_pre_wrap_hooks", [])


def _remove_hook(model_config: Any) -> None:
    hooks = _hooks_of(model_config)
    hooks[:] = [hook for hook in hooks if not isinstance(hook, _Hook)]
