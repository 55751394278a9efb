"""The overlapping block in Megatron's own entry script, through its ``--spec``.

``--spec megatron_lancet.training.spec overlapped_gpt`` makes Megatron ask for its layers here, while it builds its
model. The layers are its own; the plan is put into the model afterwards, by a hook of Megatron's model builder. What a
step passes through is changed until the process ends.
"""

import argparse
import os
import shlex
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

import torch
from megatron.training import get_args
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import USAGE_EXIT_CODE, UsageError, exit_with_usage_error
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.training.arguments import config_from_words
from megatron_lancet.training.megatron import patches
from megatron_lancet.training.megatron.versions import check_versions
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.plan.comm_priority import choose_micro_ops
from megatron_lancet.training.plan.flag_mapping import refuse_mapped_flags
from megatron_lancet.training.plan.select import choose_plan
from megatron_lancet.training.plan.support import overlap_blockers
from megatron_lancet.training.process.console import say
from megatron_lancet.training.process.exit import leave
from megatron_lancet.training.run import enter_run
from megatron_lancet.training.tuning.announcement import announced_plan

FLAGS_VARIABLE = "LANCET_FLAGS"
"""Environment variable with ``--lancet-*`` flags: Megatron's own script does not know them."""


def overlapped_gpt(config: GPTModelConfig, vp_stage: int | None = None) -> Any:
    """What ``--spec`` names: called by Megatron's builder for each pipeline stage of the model, on all ranks.

    Flags of the plan are read from the environment variable ``LANCET_FLAGS``. Whatever can't work ends the process
    with one line and status 2.

    Args:
        config: of the model. Gets a hook on the first call.

    Returns:
        Megatron's own specification of the layers.
    """
    try:
        if not any(isinstance(hook, _SpecRun) for hook in config.pre_wrap_hooks):
            config.pre_wrap_hooks.append(_SpecRun())
    except UsageError as error:
        _end(error)
    return default_layer_spec(config, vp_stage)


class _SpecRun:
    """A hook for Megatron's model builder, and all that belongs to the run."""

    def __init__(self) -> None:
        """
        Raises:
            UsageError: the run asks for something that it can't have.
        """
        check_versions()
        patches.check_seams()
        args = get_args()
        config = _config_from_environment()
        for blocker in overlap_blockers(args, config):
            raise UsageError(f"--spec asks for the overlapping block, but {blocker}.")
        # Megatron has already made its configuration of them.
        refuse_mapped_flags(args, config)
        plan, line = choose_plan(args, config)
        micro_ops = choose_micro_ops(args, config, plan)
        say(f"Megatron-Lancet plan: {announced_plan(args, config, plan, line)} (--spec)")
        device = _device(args)
        stats = CommStats(device)
        recorder = StepRecorder(args, device, stats, config.tune_steps)
        # Kept by the model's configuration, which lives as long as training: what it holds is undone with it.
        self._stack = ExitStack()
        self._setup, report = enter_run(self._stack, args, config, plan, device, stats, recorder, micro_ops)
        self._stack.enter_context(patches.after_training(report))
        if self._setup.delays_weight_grads:
            self._stack.enter_context(patches.late_weight_grads())

    def __call__(self, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Called on all ranks with the unwrapped pipeline stages of this one."""
        try:
            return self._setup(stages)
        except UsageError as error:
            _end(error)


def _config_from_environment() -> LancetConfig:
    try:
        config = config_from_words(shlex.split(os.environ.get(FLAGS_VARIABLE, "")))
    except (UsageError, ValueError) as error:
        raise UsageError(f"{FLAGS_VARIABLE}: {error}") from error
    if config.profile is not None:
        raise UsageError(f"{FLAGS_VARIABLE}: --lancet-profile does not work with --spec; use tools/profile_model.py.")
    return config


def _device(args: argparse.Namespace) -> torch.device:
    """Megatron has chosen by now: gloo is what it uses without GPUs."""
    if args.distributed_backend == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _end(error: UsageError) -> NoReturn:
    """One line, and no clean-up: Megatron's process groups are up, and would wait for each other."""
    with suppress(SystemExit):
        exit_with_usage_error(str(error))
    leave(USAGE_EXIT_CODE)
