"""A run as a hook for a model builder. Every launcher has one: Megatron's loop, its own script and other programs."""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from megatron_lancet.config import LancetConfig
from megatron_lancet.feature import RunFacts
from megatron_lancet.files.report_folder import check_report_folder
from megatron_lancet.training.megatron import patches
from megatron_lancet.training.overlap_setup import NoOverlap
from megatron_lancet.training.plan.attention import uses_sdpa
from megatron_lancet.training.plan.connections import one_connection_note
from megatron_lancet.training.plan.select import choose_plan
from megatron_lancet.training.process.console import say
from megatron_lancet.training.run import (
    OverlappedRun,
    StockRun,
    announced,
    check_features,
    facts_of_run,
    notes_of_features,
)


class RunHook:
    """Takes the pipeline stages of a rank between building and DDP, and makes them run by the plan that it chose.

    In order: :meth:`choose`, :meth:`change_layers` if Megatron is to build them, :meth:`enter`, the call, the training,
    :meth:`report`, and the end of :attr:`changes`.

    Attributes:
        changes: undoes the changes to Megatron when it is closed.
        line: the plan and its source, or why there is none; empty before :meth:`choose`.
    """

    _facts: RunFacts

    def __init__(self) -> None:
        self.changes = ExitStack()
        self.line = ""
        self._run: StockRun | OverlappedRun | None = None

    def choose(self, args: argparse.Namespace, config: LancetConfig, device: torch.device, how: str = "") -> RunFacts:
        """Choose how to train, the same on all ranks, and print it.

        Args:
            args: Megatron's arguments, validated.
            device: device of this rank.
            how: the end of the printed line.

        Raises:
            UsageError: the user asks for something that the run does not allow.
        """
        plan, line = choose_plan(args, config)
        facts = self._facts = facts_of_run(args, config, plan, device)
        check_features(facts)
        check_report_folder(config.report_dir)
        self.line = f"{announced(facts, line)[0]}{notes_of_features(facts)}"
        say(f"Megatron-Lancet plan: {self.line}{how}")
        if plan is not None and (note := one_connection_note(device)) is not None:
            say(f"Megatron-Lancet environment: {note}")
        return facts

    def change_layers(self) -> None:
        """Change which layers Megatron builds from now on."""
        self.changes.enter_context(patches.sequence_parallel_with_torch_norm())
        self.changes.enter_context(patches.fused_core_attention(uses_sdpa(self._facts.args, self._facts.config)))

    def enter(self, around_steps: Callable[..., Any] = patches.train_step_hooks) -> StockRun | OverlappedRun:
        """Change Megatron's steps and DDP, before the model is wrapped.

        Args:
            around_steps: puts hooks, which it takes as a list, around each training step; returns a context.

        Raises:
            UsageError: the user asks for something that the run does not allow.
        """
        run = self._run = (StockRun if self._facts.plan is None else OverlappedRun)(self._facts)
        run.enter(self.changes, around_steps)
        if run.setup.delays_weight_grads:
            self.changes.enter_context(patches.late_weight_grads(self.is_prepared))
        return run

    def __call__(self, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Prepares the unwrapped stages of this rank, in place. Collective over all ranks.

        Raises:
            UsageError: ranks disagree, or the model does not allow the plan.
        """
        assert self._run is not None
        return self._run.setup(stages)

    def report(self) -> None:
        """Print and write the closing report. Collective over all ranks."""
        assert self._run is not None
        self._run.report()

    def is_prepared(self, model: torch.nn.Module) -> bool:
        """Whether a model, wrapped or not, holds a stage that this hook has prepared."""
        if self._run is None:
            return False
        stages = {id(stage) for stage in self._run.setup.stages}
        return any(id(module) in stages for module in model.modules())

    @property
    def num_steps_done(self) -> int:
        """Steps so far."""
        return self._run.recorder.num_done if self._run is not None else 0

    @property
    def position(self) -> str:
        """The collective that this rank has reached, for error messages."""
        return self._run.setup.position if self._run is not None else NoOverlap.position
