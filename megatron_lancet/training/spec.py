"""The overlapping block in Megatron's own entry script, through its ``--spec``.

``--spec megatron_lancet.training.spec overlapped_gpt`` makes Megatron's model builder call this file for its layers.
The layers are Megatron's own; a hook of the builder puts the plan into the model afterwards. Megatron stays changed
until the process ends.
"""

import argparse
import os
import shlex
from typing import Any

import torch
from megatron.training import get_args
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megatron_lancet.config import FLAGS_VARIABLE, OWN_SPEC, LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.registry import features
from megatron_lancet.training.arguments import config_from_words
from megatron_lancet.training.megatron import patches
from megatron_lancet.training.megatron.seams import check_seams
from megatron_lancet.training.megatron.versions import check_versions
from megatron_lancet.training.plan.flag_mapping import refuse_mapped_flags
from megatron_lancet.training.plan.support import overlap_blockers
from megatron_lancet.training.process.exit import refuse_now
from megatron_lancet.training.run_hook import RunHook


def overlapped_gpt(config: GPTModelConfig | None = None, vp_stage: int | None = None, **inputs: Any) -> Any:
    """The function that ``--spec`` names. Megatron's builder calls it for each pipeline stage, on all ranks.

    A hybrid model takes it for its stack of layers and calls it in the first forward pass, which is refused.

    ``LANCET_FLAGS`` holds the ``--lancet-*`` flags. A refused setting ends the process with one line and status 2.

    Args:
        config: the model's configuration; the first call adds a hook to it.
        inputs: what a hybrid model gives its layers.

    Returns:
        Megatron's own specification of the layers.
    """
    if config is None or inputs:
        refuse_now(
            UsageError(
                f"--spec {' '.join(OWN_SPEC)} is for GPT models. Start a hybrid model with pretrain_gpt_moe.py, which "
                "overlaps --hybrid-layer-pattern without --spec."
            )
        )
    try:
        if not any(isinstance(hook, _SpecHook) for hook in config.pre_wrap_hooks):
            config.pre_wrap_hooks.append(_SpecHook())
    except UsageError as error:
        refuse_now(error)
    return default_layer_spec(config, vp_stage)


class _SpecHook(RunHook):
    """Megatron's configuration keeps this object, and with it the changes to Megatron, as long as training lasts."""

    def __init__(self) -> None:
        super().__init__()
        check_versions()
        check_seams()
        args = get_args()
        config = _config_from_environment()
        restarts = ["--inprocess-restart would prepare a second model (drop it)"] if args.inprocess_restart else []
        for blocker in (*restarts, *overlap_blockers(args, config)):
            raise UsageError(f"--spec asks for the overlapping block, but {blocker}.")
        # Megatron has already made its configuration from these flags.
        refuse_mapped_flags(args, config)
        self.choose(args, config, _device(args), " (--spec)")
        self.change_layers()
        self.enter()
        self.changes.enter_context(patches.training_loop_hooks(after=self.report))

    def __call__(self, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Called on all ranks with the unwrapped pipeline stages of this one."""
        try:
            return super().__call__(stages)
        except UsageError as error:
            refuse_now(error)


def _config_from_environment() -> LancetConfig:
    try:
        config = config_from_words(shlex.split(os.environ.get(FLAGS_VARIABLE, "")), features())
    except (UsageError, ValueError) as error:
        raise UsageError(f"{FLAGS_VARIABLE}: {error}") from error
    for flag, entry, its, value in config.entries():
        if its.not_with_spec and value != entry.default:
            raise UsageError(f"{FLAGS_VARIABLE}: {flag} does not work with --spec{its.not_with_spec}")
    return config


def _device(args: argparse.Namespace) -> torch.device:
    """The device that Megatron has chosen: it uses gloo where there is no GPU."""
    if args.distributed_backend == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
