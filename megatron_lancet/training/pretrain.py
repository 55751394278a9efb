"""The main job: Megatron's pretraining loop over a GPT-MoE, overlapped by a plan."""

import functools
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from megatron_lancet.config import is_dry_run
from megatron_lancet.training.megatron.versions import check_versions
from megatron_lancet.training.process.console import say
from megatron_lancet.training.process.exit import Whereabouts, run_rank

if TYPE_CHECKING:
    import torch  # not at run time: processes that Megatron spawns while it saves import this module first

_MISSING_OPTIONAL = r".*([Aa]pex|[Tt]ransformer[ -][Ee]ngine|transformer-engine|absl).*"
"""Megatron warns about each optional package on import, on every rank; all of them are optional here."""


def main() -> None:
    """Entry point of ``pretrain_gpt_moe.py`` and of the console script."""
    run_rank(_main)


def _main(where: Whereabouts) -> None:
    check_versions()
    warnings.filterwarnings("ignore", message=_MISSING_OPTIONAL, category=UserWarning)
    # Only now: what follows imports megatron, in a version that we know.
    from megatron_lancet.training.platform.detect import platform

    if is_dry_run(sys.argv):
        from megatron_lancet.training.dry_run.run import run_dry

        run_dry()
        return
    with platform() as found:
        say(f"Megatron-Lancet: {found.description}")
        _pretrain(found.device, where)


def _pretrain(device: "torch.device", where: Whereabouts) -> None:
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    from megatron_lancet.runtime.comm_stats import CommStats
    from megatron_lancet.training import arguments
    from megatron_lancet.training.checkpoint.ep_resize import check_checkpoint
    from megatron_lancet.training.checkpoint.load_save import Checkpoints, check_before_start
    from megatron_lancet.training.megatron import checkpoint_patches, patches
    from megatron_lancet.training.observe.step_recorder import StepRecorder
    from megatron_lancet.training.plan.comm_priority import choose_micro_ops
    from megatron_lancet.training.plan.normalize import normalize_args
    from megatron_lancet.training.plan.select import choose_plan
    from megatron_lancet.training.platform import mock
    from megatron_lancet.training.platform.detect import apply_cpu_settings
    from megatron_lancet.training.process.sigterm import StopRequest, saves_on_sigterm
    from megatron_lancet.training.run import enter_run
    from megatron_lancet.training.tuning.announcement import announced_plan
    from megatron_lancet.training.tuning.profiling import check_can_profile

    patches.check_seams()
    args, config = arguments.parse()
    if device.type == "cpu":
        apply_cpu_settings(args)
    for change in normalize_args(args, config):
        say(f"Megatron-Lancet flags: {change}")
    arguments.validate(args)
    check_before_start(args)
    if mock.is_mocked(args):
        say(f"Megatron-Lancet world: {mock.describe_mocked_world(args)}")
    plan, line = choose_plan(args, config)
    micro_ops = choose_micro_ops(args, config, plan)
    check_can_profile(args, config, plan)
    say(f"Megatron-Lancet plan: {announced_plan(args, config, plan, line)}")

    stop = StopRequest(where, device) if saves_on_sigterm(args, config) else None
    stats = CommStats(device)
    recorder = StepRecorder(args, device, stats, config.tune_steps)
    with arguments.megatrons_refusals():
        model_config = gpt_config_from_args(args)
        run_config = pretrain_cfg_container_from_args(args, model_config)

    with ExitStack() as stack:
        stack.enter_context(mock.mocked_world_of(args))
        stack.enter_context(Checkpoints(args).watched())
        stack.enter_context(checkpoint_patches.arguments_before_loading(functools.partial(check_checkpoint, args)))
        if stop is not None:
            stack.enter_context(checkpoint_patches.asked_to_stop(stop, stop.begin))
        stack.enter_context(checkpoint_patches.queue_lives_with_the_rank())
        setup, report = enter_run(stack, args, config, plan, device, stats, recorder, micro_ops)
        if plan is not None:
            run_config.ddp.delay_wgrad_compute = setup.delays_weight_grads
        model_config.pre_wrap_hooks.append(setup)
        where.describe = lambda: f"{recorder.num_done} steps done, {setup.position}"
        _run(run_config, report)


def _run(run_config: object, report: Callable[[], None]) -> None:
    """Megatron's training; then the report, also where Megatron ends the process at an exit condition."""
    import torch.distributed as dist
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    from megatron_lancet.training.megatron.gpt_data import build_datasets, forward_step

    status: str | int | None = 0
    try:
        pretrain(run_config, build_datasets, ModelType.encoder_or_decoder, forward_step)
    except SystemExit as request:
        if request.code is None:
            # Not the end of the loop, which gives a status: the other ranks may be anywhere.
            raise SystemExit("error: Megatron ended this rank without a status; it says why above.") from None
        # Not the request itself: its traceback keeps data loaders alive, whose workers must end before this process.
        status = request.code
    report()
    dist.barrier()
    dist.destroy_process_group()
    if status != 0:
        sys.exit(status)
