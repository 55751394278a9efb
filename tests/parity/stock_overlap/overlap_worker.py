"""Runs stock modules as ``pretrain_gpt_moe.py`` starts them, and as Megatron's own script does without our code.

Usage: overlap_worker.py RESULT.json RUNS.json. RUNS.json has for each name: ``ours`` or ``stock``, a command line, and
whether the run ends before it uses the GPU its flags need. All runs share one process and its default process group.
Each rank writes RESULT.json.<rank>.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.errors import UsageError
from megatron_lancet.patching import around, replaced
from megatron_lancet.runtime.connections import CONNECTIONS
from tests.ranks.pretrain_worker import recording
from tests.ranks.worker import finish, run_on_cpu_with_te


def datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Builds Megatron's data sets, on every rank."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.training import get_args, get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_and_blend_per_split(args)[0],
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, config).build()


setattr(datasets, "is_distributed", True)  # noqa: B010 - mypy rejects attributes of functions


def loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = torch.sum(losses.view(-1).float() * mask.view(-1))
    num_tokens = mask.sum().int()
    return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.float()])}


def forward_step(iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """Forward step with the interface of Megatron's own script."""
    sample = next(iterator)
    inputs = [sample["tokens"], sample["position_ids"], sample.get("attention_mask")]
    run = model.build_schedule_plan if return_schedule_plan else model
    return run(*inputs, labels=sample["labels"], loss_mask=sample["loss_mask"]), partial(loss, sample["loss_mask"])


def as_stock() -> None:
    """Runs the main part of Megatron's script with the arguments in ``sys.argv``."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables

    from megatron_lancet.training.platform.detect import apply_cpu_settings

    args = parse_args()
    apply_cpu_settings(args)
    validate_args(args)
    set_global_variables(args)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


def as_ours() -> None:
    from megatron_lancet.training.job import run_job
    from megatron_lancet.training.process.exit import RankStatus

    run_job(torch.device("cpu"), RankStatus())


@contextmanager
def anew() -> Iterator[None]:
    """Gives Megatron the global state of a new process, but keeps the default process group."""
    from megatron.core.pipeline_parallel import utils
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.training import training

    environment = dict(os.environ)
    try:
        yield
    finally:
        training.destroy_global_state()
        destroy_moe_metrics_tracker()
        utils._COMM_STREAM = None
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def gpu_flags_kept() -> Iterator[None]:
    """Lets CPU settings accept CUDA graphs: Megatron captures them only after warm-up steps."""
    from megatron_lancet.training import job
    from megatron_lancet.training.platform import detect

    def apply(stock: Callable[[Any], None], args: Any) -> None:
        graphs, args.cuda_graph_impl = args.cuda_graph_impl, "none"
        stock(args)
        args.cuda_graph_impl = graphs

    with around(detect, "apply_cpu_settings", apply), around(job, "apply_cpu_settings", apply):
        yield


def outcome(run: Callable[[], None], command: list[str], only_warms_up: bool) -> dict[str, Any]:
    """Executes a run and returns its outcome.

    Returns:
        Losses, packages of the model's classes and the number of Megatron's schedules, or the refusal.
    """
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
    from megatron.training import training

    losses: list[dict[str, float]] = []
    classes: set[str] = set()
    schedules: list[int] = []

    def scheduled(stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        schedules.append(len(losses))
        stock(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(sys, "argv", [sys.argv[0], *command]))
        stack.enter_context(anew())
        stack.enter_context(gpu_flags_kept() if only_warms_up else nullcontext())
        stack.enter_context(around(TransformerModelChunkSchedulePlan, "__init__", scheduled))
        stack.enter_context(around(training, "train_step", recording(losses, classes)))
        try:
            run()
        except UsageError as refusal:
            assert not losses, "refused after its start"
            return {"refused": str(refusal)}
    packages = sorted({name.partition(".")[0] for name in classes})
    return {"losses": losses, "packages": packages, "num_schedules": len(schedules)}


def main() -> None:
    from megatron_lancet.training import job

    runs = json.loads(Path(sys.argv[2]).read_text())
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    with around(job.dist, "destroy_process_group", lambda stock, group=None: group and stock(group)):
        for name, (entry, command, only_warms_up) in runs.items():
            # Megatron requires 1 with tensor parallelism and forbids it with FSDP.
            os.environ[CONNECTIONS] = "1" if "--tensor-model-parallel-size" in command else "32"
            run = as_ours if entry == "ours" else as_stock
            results[name] = outcome(run, command, only_warms_up)
    finish(results)


if __name__ == "__main__":
    run_on_cpu_with_te(main)
