"""The main job: Megatron's pretraining loop over a GPT-MoE, overlapped by a plan."""

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack

import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.training.console import say
from megatron_lancet.training.ending import Whereabouts, run_rank
from megatron_lancet.training.requirements import check_versions

_MISSING_OPTIONAL = r".*([Aa]pex|[Tt]ransformer[ -][Ee]ngine|transformer-engine|absl).*"
"""Megatron warns about each optional package on import, on every rank; all of them are optional here."""


def main() -> None:
    """Entry point of ``pretrain_gpt_moe.py`` and of the console script."""
    run_rank(_main)


def _main(where: Whereabouts) -> None:
    check_versions()
    warnings.filterwarnings("ignore", message=_MISSING_OPTIONAL, category=UserWarning)
    # Only now: what follows imports megatron, in a version that we know.
    from megatron_lancet.training.platform import platform

    with platform() as found:
        say(f"Megatron-Lancet: {found.description}")
        _pretrain(found.device, where)


def _pretrain(device: torch.device, where: Whereabouts) -> None:
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    from megatron_lancet.runtime.comm_stats import CommStats
    from megatron_lancet.training import arguments, mocked, upstream
    from megatron_lancet.training.comm_priority import choose_micro_ops
    from megatron_lancet.training.overlap_setup import NoOverlap, OverlapSetup
    from megatron_lancet.training.overlapped_run import OverlappedRun
    from megatron_lancet.training.plan_choice import choose_plan, is_tuned, needs_own_attention
    from megatron_lancet.training.platform import apply_cpu_settings
    from megatron_lancet.training.profiling import check_can_profile
    from megatron_lancet.training.step_recorder import StepRecorder

    upstream.check_seams()
    args, config = arguments.parse()
    if device.type == "cpu":
        apply_cpu_settings(args)
    arguments.validate(args)
    if mocked.is_mocked(args):
        say(f"Megatron-Lancet world: {mocked.describe_mocked_world(args)}")
    plan, line = choose_plan(args, config)
    micro_ops = choose_micro_ops(args, config, plan)
    check_can_profile(args, config, plan)
    tunes = plan is not None and is_tuned(args, config)
    say(f"Megatron-Lancet plan: {'found while training, or in a short run ' if tunes else ''}{line}")

    stats = CommStats(device)
    recorder = StepRecorder(args, device, stats)
    try:
        model_config = gpt_config_from_args(args)
        run_config = pretrain_cfg_container_from_args(args, model_config)
    except (AssertionError, ValueError) as error:
        raise UsageError(f"Megatron refuses the arguments: {arguments.reason_of(error)}") from error

    with ExitStack() as stack:
        stack.enter_context(mocked.mocked_world_of(args))
        stack.enter_context(upstream.sequence_parallel_with_torch_norm())
        stack.enter_context(upstream.core_attention_without_te(needs_own_attention(args) is not None))
        stack.enter_context(upstream.resumable_distributed_optimizer())
        setup: NoOverlap | OverlapSetup
        if plan is None:
            stack.enter_context(upstream.measured_stock_communication(stats))
            stack.enter_context(upstream.observed_train_step(recorder.observe))
            setup, report = NoOverlap(), lambda: recorder.report(None, config.report_dir)
        else:
            run = OverlappedRun(args, config, plan, device, stats, recorder, micro_ops)
            run.enter(stack)
            setup, report = run.setup, run.report
            run_config.ddp.delay_wgrad_compute = run.setup.delays_weight_grads
        model_config.pre_wrap_hooks.append(setup)
        where.describe = lambda: f"{len(recorder.records)} steps done, {setup.position}"
        _run(run_config, report)


def _run(run_config: object, report: Callable[[], None]) -> None:
    """Megatron's training; then the report, also where Megatron ends the process at an exit condition."""
    import torch.distributed as dist
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    from megatron_lancet.training.gpt_data import build_datasets, forward_step

    exit_request: SystemExit | None = None
    try:
        pretrain(run_config, build_datasets, ModelType.encoder_or_decoder, forward_step)
    except SystemExit as request:
        if request.code is None:
            # Not the end of the loop, which gives a status, but a checkpoint that this rank can't read: the others
            # may be anywhere.
            raise
        exit_request = request
    report()
    dist.barrier()
    dist.destroy_process_group()
    if exit_request is not None:
        sys.exit(exit_request.code)
