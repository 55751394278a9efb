"""Megatron's configuration of a model, which its builder takes."""

import argparse

from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.models.base import ModelConfig


def model_config_from_args(args: argparse.Namespace) -> ModelConfig:
    """The configuration of a hybrid model where ``--hybrid-layer-pattern`` is set, otherwise of a GPT.

    Raises:
        AssertionError, ValueError: Megatron refuses the arguments.
    """
    config: ModelConfig = (gpt_config_from_args if args.hybrid_layer_pattern is None else hybrid_config_from_args)(args)
    return config
