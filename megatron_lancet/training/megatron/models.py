"""Megatron's models: their configuration, and a GPT outside of a training run."""

import argparse

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.models.base import ModelConfig
from megatron.training.models.gpt import GPTModelBuilder

from megatron_lancet.errors import UsageError
from megatron_lancet.registry import features


def model_config_from_args(args: argparse.Namespace) -> ModelConfig:
    """The configuration that Megatron's builder takes: of a hybrid model with ``--hybrid-layer-pattern``, or of a GPT.

    Raises:
        AssertionError, ValueError: Megatron refuses the arguments.
    """
    config: ModelConfig = (gpt_config_from_args if args.hybrid_layer_pattern is None else hybrid_config_from_args)(args)
    return config


def build_plain_gpt(args: argparse.Namespace) -> torch.nn.Module:
    """Build Megatron's GPT for a set of arguments, without DDP. The process groups must exist.

    Raises:
        UsageError: Megatron refuses the arguments.
    """
    try:
        config = gpt_config_from_args(args)
        config.finalize()
    except (AssertionError, ValueError, ImportError) as error:
        raise UsageError(f"Megatron can't build this model: {error}") from error
    module: torch.nn.Module = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    for feature in features():
        feature.prepare_built(args, module)
    return Float16Module(config.transformer, module) if args.fp16 or args.bf16 else module
