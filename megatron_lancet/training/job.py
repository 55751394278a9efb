"""Megatron's pretraining loop over a GPT or a hybrid model, from the command line to the report.

The phases: read the arguments, choose the plan, make Megatron's configurations, change Megatron, train, report.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import Feature
from megatron_lancet.training import arguments
from megatron_lancet.training.megatron.gpt_data import builder_of, embedding_ranks, forward_step, reader_of
from megatron_lancet.training.megatron.models import model_config_from_args
from megatron_lancet.training.megatron.patches import dataset_helpers_of_the_wheel
from megatron_lancet.training.megatron.seams import check_seams
from megatron_lancet.training.plan.normalize import normalize_args
from megatron_lancet.training.plan.support import own_samples
from megatron_lancet.training.platform.detect import apply_cpu_settings
from megatron_lancet.training.process.console import say
from megatron_lancet.training.process.exit import RankStatus
from megatron_lancet.training.run_hook import RunHook

_PORT_IN_USE = "EADDRINUSE"


def run_job(
    device: torch.device,
    status: RankStatus,
    datasets: Callable[..., Any] | None = None,
    *,
    features: Sequence[Feature],
) -> None:
    """Train by the arguments of the command line.

    Args:
        device: device of this rank.
        status: receives a function that returns how far the rank is.
        datasets: what Megatron's loop calls for its data; None for the data that the arguments name.
        features: the optional features of the run.

    Raises:
        UsageError: the command line, a file or this machine does not allow the run.
        CheckpointError: a checkpoint can't be loaded or saved.
        SystemExit: Megatron ended the run with a nonzero status.
    """
    check_seams()
    args, config = _read_arguments(device, features)
    hook = RunHook()
    facts = hook.choose(args, config, device)
    for feature in config.features:
        for line in feature.announce(facts):
            say(f"Megatron-Lancet {line}")
    # Megatron's validation has set it to False; stages then send each other the shape of each message.
    samples = own_samples(args, config)
    has_plan = facts.plan is not None
    varies = samples is not None or any(feature.shapes_vary(args, has_plan) for feature in config.features)
    args.variable_seq_lengths = args.pipeline_model_parallel_size > 1 and varies
    with arguments.megatrons_refusals():
        model_config = model_config_from_args(args)
        run_config = pretrain_cfg_container_from_args(args, model_config)

    with hook.changes as changes:
        for feature in config.features:
            feature.enter(replace(facts, status=status), changes)
        hook.change_layers()
        hook.enter()
        changes.enter_context(dataset_helpers_of_the_wheel())
        model_config.pre_wrap_hooks.append(hook)
        status.describe = lambda: f"{hook.num_steps_done} steps done, {hook.position}"
        forward = functools.partial(forward_step, read=reader_of(args, config))
        ranks = functools.partial(embedding_ranks, args)
        exit_status = _train(run_config, datasets or builder_of(samples), forward, ranks)
        hook.report()
        dist.barrier()
        dist.destroy_process_group()
        if exit_status != 0:
            sys.exit(exit_status)


def _read_arguments(device: torch.device, features: Sequence[Feature]) -> tuple[argparse.Namespace, LancetConfig]:
    """Parse and validate ``sys.argv``, and print every setting that is changed."""
    args, config = arguments.parse(features)
    if device.type == "cpu":
        apply_cpu_settings(args)
    arguments.take_checkpoint_arguments(args, config)
    for change in normalize_args(args, config):
        say(f"Megatron-Lancet flags: {change}")
    arguments.validate(args, config)
    return args, config


def _train(
    run_config: object, datasets: Callable[..., Any], step: Callable[..., Any], ranks: Callable[[list[int]], list[int]]
) -> str | int | None:
    """Run Megatron's training; returns its exit status, also when an exit condition of Megatron ends the process.

    Raises:
        UsageError: rank 0 can't listen for the others.
    """
    try:
        pretrain(run_config, datasets, ModelType.encoder_or_decoder, step, get_embedding_ranks=ranks)
    except SystemExit as request:
        converted = f"{str(get_args().ckpt_convert_save).rstrip('/')}/{get_args().ckpt_convert_format}"
        if request.code is None and get_args().save != converted:  # a conversion sets save, and ends with exit()
            # The end of the loop gives a status; this is an exit elsewhere, and the other ranks may still be running.
            raise SystemExit("error: Megatron ended this rank without a status; it says why above.") from None
        # The exception is not kept: its traceback holds data loaders, whose workers must end before this process.
        return request.code or 0
    except dist.DistNetworkError as error:
        if _PORT_IN_USE not in str(error):
            raise
        raise UsageError(
            f"another program uses the port on which the ranks are to meet ({_PORT_IN_USE}): MASTER_PORT is "
            f"{os.environ.get('MASTER_PORT')}. Set it to a free port, the same for all ranks."
        ) from error
    return 0
