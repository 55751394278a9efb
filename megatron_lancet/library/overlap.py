"""The overlap as a hook for any program that builds a Megatron-Core model and trains it with Megatron's schedules."""

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from megatron.core import num_microbatches_calculator

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.library.changing_shapes import ChangingShapes
from megatron_lancet.library.models import (
    check_gradient_hooks,
    device_of,
    has_experts,
    language_model_of,
    refuse_foreign_parts,
)
from megatron_lancet.library.refused_flags import OnlyWithPlan, check_flags
from megatron_lancet.library.run_arguments import StepShape, check_packed_samples, run_arguments
from megatron_lancet.library.versions import check_megatron
from megatron_lancet.model.gpt import LanguageModel
from megatron_lancet.module_types import register_module_types
from megatron_lancet.registry import features
from megatron_lancet.training.arguments import config_from_words
from megatron_lancet.training.megatron import patches
from megatron_lancet.training.overlap_setup import NoOverlap
from megatron_lancet.training.process.console import say
from megatron_lancet.training.run_hook import RunHook


class Overlap(RunHook):
    """Makes a model run by a plan: a hook that takes the pipeline stages of a rank between building and DDP.

    ::

        overlap = megatron_lancet.Overlap(ddp_config, micro_batch_size=1, seq_length=4096, num_micro_batches=8)
        stages = overlap(stages)              # after weights are loaded, before Float16Module and DDP
        with overlap:                         # at its end: the report; Megatron is as before
            ...                               # the training, by get_forward_backward_func()

    A builder with pre-wrap hooks, such as Megatron-Bridge's, takes the object as a hook. It changes modules in place:
    parameters and their names stay. A *step* is a call of the function that ``get_forward_backward_func`` returns, with
    a model that has been hooked and without ``forward_only``. Other models, and passes with ``forward_only``, stay
    stock's. All ranks call the hook and run the same steps.

    One object at a time changes Megatron in a process: from the hook, or :meth:`install`, to :meth:`close`.

    Attributes:
        line: the plan and its source, or why there is none; empty before the hook was called.
    """

    _open: "ClassVar[Overlap | None]" = None

    def __init__(
        self,
        ddp_config: Any = None,
        *,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        num_micro_batches: int | None = None,
        num_steps: int | None = None,
        packed_samples: bool = False,
        timeout_minutes: int = 10,
        flags: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        """
        Args:
            ddp_config: the ``DistributedDataParallelConfig`` of the model's DDP; :meth:`install` needs none.
            micro_batch_size: samples of a micro-batch. None, and no ``seq_length``: both change from micro-batch to
                micro-batch, and their number from step to step. The plan must be fixed then, and cut no micro-batch.
            seq_length: tokens of a sample.
            num_micro_batches: micro-batches of a step on this rank. None: as Megatron's calculator has it, where the
                launcher has set that up.
            num_steps: steps of the training. With fewer steps than tuning takes, the plan is fixed. None: not known.
            packed_samples: whether the model gets ``packed_seq_params``, the bounds of documents that do not attend to
                each other. Their lengths may differ in each micro-batch.
            timeout_minutes: longest wait for a message of another rank.
            flags: ``--lancet-*`` flags and their values, as words of a command line.
            settings: values of ``--lancet-*`` flags by their names with underscores, such as ``plan="off"``,
                ``num_chunks=2`` or ``pairing="on"``; ``--lancet-help`` lists them. None: the flag's default.

        Raises:
            UsageError: a setting is unknown or wrong, or the installed Megatron is of another version.
        """
        check_megatron()
        super().__init__()
        if (micro_batch_size is None) != (seq_length is None):
            raise UsageError("expected micro_batch_size and seq_length, or neither of them, found one.")
        self._config = _config_of(flags, settings, shapes_change=seq_length is None)
        if packed_samples and settings.get("chunk_dim") == "batch" and settings.get("num_chunks") != 1:
            raise UsageError(
                "chunk_dim='batch' does not work with packed samples, which lie end to end in one row. Pass "
                "chunk_dim='sequence' or num_chunks=1."
            )
        self._shape = StepShape(micro_batch_size, seq_length, num_micro_batches, num_steps, packed_samples)
        self._ddp_config, self._timeout_minutes = ddp_config, timeout_minutes
        self._is_hooked = False
        self._waiting: list[tuple[Callable[[], None], torch.nn.Module]] = []  # virtual stages until the last one

    def __call__(self, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Prepares the unwrapped pipeline stages of this rank, in place. Collective over all ranks.

        A stage may hold its language model, as vision-language models do.

        Returns:
            The same stages.

        Raises:
            UsageError: the model or a setting does not allow what was asked for, or ranks disagree. Megatron is as
                before then.
        """
        if self._is_hooked:
            raise UsageError("this Overlap has prepared a model already: close it, and make one for the next model.")
        if self._ddp_config is None:
            raise UsageError("expected the DDP configuration of the model, Overlap(ddp_config, ...), found none.")
        self._begin()
        self._is_hooked = True
        try:
            return self._prepare(stages)
        except BaseException:
            self.changes.close()
            raise

    def _prepare(self, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
        for stage in stages:
            refuse_foreign_parts(stage)
        models = [language_model_of(stage) for stage in stages]
        shape = self._known_shape(models[0])
        args = run_arguments(models, self._ddp_config, shape, self._timeout_minutes)
        facts = self.choose(args, self._config, device_of(models[0]))
        if facts.plan is None:
            return NoOverlap()(stages)
        if shape.has_packed_samples:
            check_packed_samples(models[0].config, getattr(models[0], "position_embedding_type", None))

        def counted(step: Callable[[], Any]) -> Any:
            result = step()
            args.curr_iteration += 1  # as Megatron's loop does
            return result

        run = self.enter(lambda hooks: patches.schedule_hooks(self._is_trained, [counted, *hooks]))
        super().__call__(models)
        if args.overlap_grad_reduce and run.setup.delays_weight_grads:
            check_gradient_hooks(models)
        if "megatron.bridge" in sys.modules:  # it may export the model, for a server or at the end
            register_module_types(models)
        return stages

    def install(self) -> Self:
        """For launchers without a hook: prepares the first model with experts that Megatron's DDP wraps.

        DDP wraps virtual stages one by one. All of them are prepared, and wrapped, when the last one comes.

        Raises:
            UsageError: another object is open; or as :meth:`__call__`, when DDP wraps the model.
        """
        self._begin()
        self.changes.enter_context(patches.around_ddp(self._take_from_ddp))
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.changes.close()

    def close(self) -> None:
        """Prints the report, and leaves Megatron as it was; the model keeps its plan. Collective over all ranks."""
        try:
            if self._run is not None:
                self.report()
        finally:
            self._run = None
            self.changes.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns the object itself: Megatron copies configurations, which may hold their hooks."""
        return self

    @property
    def plan_text(self) -> str:
        """The plan of the last step; ``off`` for stock modules."""
        return str(self._run.setup.plan) if self._run is not None else "off"

    def _begin(self) -> None:
        """Only one object is open: two that end in the order of their beginning would restore each other's changes."""
        if Overlap._open is self:
            return
        if Overlap._open is not None:
            raise UsageError(
                "expected one open Overlap in a process, found another one, which has changed Megatron. Call its "
                "close(), or leave its `with` block, before the next one is called or installed."
            )
        Overlap._open = self
        self.changes.callback(setattr, Overlap, "_open", None)

    def _known_shape(self, model: LanguageModel) -> StepShape:
        """Returns the shape of a step with its number of micro-batches; Megatron's calculator has it from now on."""
        if self._shape.changes:
            return self._shape.of_longest(model)
        has_calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None
        if self._shape.num_micro_batches is None:
            if not has_calculator:
                raise UsageError(
                    "expected num_micro_batches, found none: this launcher has not set up Megatron's calculator of "
                    "micro-batches. Pass Overlap(..., num_micro_batches=N)."
                )
            return self._shape.with_micro_batches(num_microbatches_calculator.get_num_microbatches())
        if not has_calculator:
            calculator = self._shape.calculator()
            self.changes.enter_context(patches.micro_batch_calculator(calculator))
        return self._shape

    def _take_from_ddp(self, build: Callable[[], None], module: torch.nn.Module, ddp_config: Any) -> None:
        if not has_experts(module):
            return build()
        if self._is_hooked:
            if not self.is_prepared(module):
                say("Megatron-Lancet: another model with experts is trained in this process; it stays stock.")
            return build()
        self._waiting.append((build, module))
        if len(self._waiting) < (language_model_of(module).config.virtual_pipeline_model_parallel_size or 1):
            return None
        waiting, self._waiting = self._waiting, []
        self._ddp_config = ddp_config
        self([stage for _, stage in waiting])
        if self._run is not None and self._run.setup.delays_weight_grads:
            ddp_config.delay_wgrad_compute = True
        for build_one, _ in waiting:
            build_one()
        return None

    def _is_trained(self, model: torch.nn.Module | Sequence[torch.nn.Module]) -> bool:
        """Whether steps of a model, or of its stages, follow the plan."""
        return any(self.is_prepared(one) for one in ([model] if isinstance(model, torch.nn.Module) else model))


def _config_of(flags: Sequence[str], settings: dict[str, object], shapes_change: bool) -> LancetConfig:
    """Reads flags, and settings as their flags are read.

    Raises:
        UsageError: one is unknown or wrong, or needs Megatron's own training loop.
    """
    words = [*flags]
    for name, value in settings.items():
        flag = f"--lancet-{name.replace('_', '-')}"
        words += [flag] if value is True else [] if value is False or value is None else [flag, str(value)]
    own = [OnlyWithPlan(), *([ChangingShapes()] if shapes_change else [])]
    config = config_from_words(words, [*features(), *own])
    check_flags(config)
    return config
