"""Runs a dry run: from the command line to a report, in one process, without a process group."""

import argparse
import functools
import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from megatron.core.num_microbatches_calculator import _build_num_microbatches_calculator
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.lab.dry_run.cluster import assumptions, gpu_memory_bytes, on_the_cluster
from megatron_lancet.lab.dry_run.environment import missing_variables
from megatron_lancet.lab.dry_run.layout import check_shares, choose_world, layout_of
from megatron_lancet.lab.dry_run.memory import MemoryByWay, memory_of_stages
from megatron_lancet.lab.dry_run.missing import missing_inputs, missing_packages, unknown_sizes
from megatron_lancet.lab.dry_run.parameters import model_size
from megatron_lancet.lab.dry_run.plan import describe_plan, saves_scores
from megatron_lancet.lab.dry_run.report import Findings, always_pairs, pairing_lines, report
from megatron_lancet.lab.dry_run.stages import pipeline_stages
from megatron_lancet.lab.dry_run.vocabulary import set_vocabulary_size
from megatron_lancet.registry import features
from megatron_lancet.training import arguments
from megatron_lancet.training.input_files import check_datasets, check_tokenizer, missing_files
from megatron_lancet.training.megatron.models import model_config_from_args
from megatron_lancet.training.megatron.seams import check_seams
from megatron_lancet.training.plan.normalize import normalize_args
from megatron_lancet.training.plan.support import micro_batch_shape
from megatron_lancet.training.platform.cpu import gpu_available
from megatron_lancet.training.platform.detect import apply_cpu_settings
from megatron_lancet.training.platform.launcher import is_mocked
from megatron_lancet.training.process.console import say

DOES_NOT_FIT = 3
"""Exit status of a dry run whose arguments are right, and whose estimated memory is more than a GPU has."""


def examine(launched: tuple[int, str] | None = None) -> Findings:
    """Parses and validates ``sys.argv`` as the run itself would, and estimates the sizes of model and memory.

    Args:
        launched: the ranks that a launcher would start, and the source of the number.

    Raises:
        UsageError: the run would refuse its arguments.
    """
    check_seams()
    args, config = arguments.parse(features())
    with _megatrons_remarks() as remarks, on_the_cluster(args, config):
        num_ranks, source = choose_world(args, launched)
        args.rank, args.world_size = 0, num_ranks
        on_cpu = not gpu_available() and (is_mocked(args) or args.distributed_backend == "gloo")
        if on_cpu:
            apply_cpu_settings(args)
        with arguments.megatrons_refusals():
            missing = [*_take_checkpoint_arguments(args)]
        changes = normalize_args(args, config)
        missing += _validate(args, config)
        plan = describe_plan(args, config)
        with arguments.megatrons_refusals():
            model_config = model_config_from_args(args)
            pretrain_cfg_container_from_args(args, model_config)
            # Megatron's own runs take it from the arguments, and do not call finalize().
            model_config.transformer.use_te_rng_tracker = args.te_rng_tracker
            model_config.finalize()
            # Older flags for recompute, and its default parts, are resolved there.
            args.recompute_granularity = model_config.transformer.recompute_granularity
            args.recompute_modules = model_config.transformer.recompute_modules
            stages = pipeline_stages(args, model_config.transformer)
            layout = layout_of(args, _num_micro_batches(args))
    check_shares(args, layout)
    size = model_size(args, stages)
    memory_gb: float | None = args.lancet_gpu_memory_gb
    assumed = f" (assumed: {', '.join(assumptions(memory_gb))})" if assumptions(memory_gb) else ""
    machines = "CPUs, as --distributed-backend says" if on_cpu else f"GPUs{assumed}"
    missing += [] if on_cpu else [*missing_packages(args), *missing_variables(args, config)]
    samples, positions = micro_batch_shape(args, config)
    in_samples = argparse.Namespace(**{**vars(args), "micro_batch_size": samples, "seq_length": positions})
    memory_of_run = functools.partial(memory_of_stages, in_samples, layout, stages, size, saves_scores(args, config))
    stock, alone = memory_of_run(), memory_of_run(by_plan=True)
    by_way = MemoryByWay(stock, alone, memory_of_run(is_paired=True, by_plan=True))
    memory = by_way.of(plan.is_stock, always_pairs(plan))
    lines = [*plan.lines, *pairing_lines(plan, memory, by_way.paired)]
    return Findings(
        args,
        f"{num_ranks} ranks ({source}) on {machines}",
        layout,
        stages,
        size,
        memory,
        by_way,
        config,
        lines,
        changes,
        [*missing, *unknown_sizes(args), *(f"Megatron: {remark}" for remark in remarks)],
        None if on_cpu else gpu_memory_bytes(memory_gb),
    )


def _validate(args: argparse.Namespace, config: LancetConfig) -> list[str]:
    """Validates as ``arguments.validate``, but warns of missing files, and does not set Megatron's globals."""
    arguments.check_settings(args, config)
    missing = [*missing_files(args), *missing_inputs(args)]
    check_tokenizer(args)
    check_datasets(args)
    with arguments.megatrons_refusals():
        arguments.run_megatrons_checks(args, config)
        missing += set_vocabulary_size(args)
    return missing


@contextmanager
def _megatrons_remarks() -> Iterator[list[str]]:
    """Collects Megatron's warnings inside the context, and discards its log and its list of arguments."""
    remarks: list[str] = []
    level = logging.root.manager.disable
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        logging.disable(logging.WARNING)
        try:
            yield remarks
        finally:
            logging.disable(level)
            remarks += dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, UserWarning))


def _take_checkpoint_arguments(args: argparse.Namespace) -> Iterator[str]:
    """Applies ``--use-checkpoint-args`` if the checkpoint is on this machine; else yields a warning."""
    if not args.use_checkpoint_args:
        return
    if args.load is None or not Path(args.load).is_dir():
        if args.num_layers is None:
            raise UsageError(
                "--use-checkpoint-args takes the model from a checkpoint, which is not here. For a dry run pass the "
                "model's arguments too (--num-layers, --hidden-size, ...)."
            )
        yield "--use-checkpoint-args: the checkpoint is not here, so its arguments are not known to this dry run"
        return
    arguments.load_checkpoint_arguments(args)


def _num_micro_batches(args: argparse.Namespace) -> int:
    """Micro-batches of the first step on each data-parallel rank; later steps have more if the batch grows.

    Raises:
        AssertionError, ValueError: Megatron can't distribute the batch.
    """
    calculator: Any = _build_num_microbatches_calculator(
        args.rank,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size * args.gtp_weight_remat_size,
        args.decrease_batch_size_if_needed,
        args.step_batch_size_schedule,
        args.seq_length,
    )
    return calculator.get()


def run_dry(launched: tuple[int, str] | None = None) -> None:
    """Entry point: prints the report; if several ranks were started, the first one does.

    Exits with :data:`DOES_NOT_FIT` if the run needs more memory than a GPU has.

    Args:
        launched: the ranks that a launcher would start, and the source of the number.

    Raises:
        UsageError: the run would refuse its arguments.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return
    findings = examine(launched)
    say(report(findings))
    if findings.missing_bytes > 0:
        raise SystemExit(DOES_NOT_FIT)
