"""Megatron's own pretraining as its pretrain_gpt.py starts it, on a CPU; ours only as far as ``--spec`` names it.

LANCET_TEST_RESULT names a file for the exact losses; the last rank writes it.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_lancet.patching import around
from megatron_lancet.training.platform.detect import platform
from tests.ranks.pretrain_worker import recording


def pretrain_gpt(datasets: Any, forward_step: Any) -> None:
    """Runs Megatron's entry script with the arguments in ``sys.argv``."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables

    from megatron_lancet.training.megatron.patches import dataset_helpers_of_the_wheel
    from megatron_lancet.training.platform.detect import apply_cpu_settings

    args = parse_args()
    apply_cpu_settings(args)
    validate_args(args)
    set_global_variables(args)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    with dataset_helpers_of_the_wheel():
        pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    with platform():
        from megatron.training import training

        from megatron_lancet.training.megatron.gpt_data import builder_of, forward_step

        losses: list[dict[str, float]] = []
        classes: set[str] = set()
        with around(training, "train_step", recording(losses, classes)):
            pretrain_gpt(builder_of(None), forward_step)
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        result = {"losses": losses, "model_modules": sorted(classes)}
        Path(os.environ["LANCET_TEST_RESULT"]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
