"""The command of a modelled step: from a launch command's arguments to a table and a timeline."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.launch.launch import Launch
from megatron_lancet.lab.modelled_step.figures import Depth, Variant
from megatron_lancet.lab.modelled_step.recording import record
from megatron_lancet.lab.modelled_step.settings import ModelledRun, modelled_run
from megatron_lancet.lab.views.html import write_page
from megatron_lancet.report.tables import right_aligned
from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.schedule.plan import Plan, plan_without_overlap
from megatron_lancet.testkit.virtual_gpu.playback.device_model import DeviceModel
from megatron_lancet.training.platform.cpu import cpu_platform

_PAIRED_STEP = 4
"""Micro-batches of the longer step in pairs: two of them, and one less in the shorter step, have two partners."""


def modelled(own: argparse.Namespace, launch: Launch) -> str:
    """Runs the command; returns its output.

    Args:
        own: the flags of ``arguments.add_arguments``, checked.
        launch: the training.

    Raises:
        UsageError: a flag is refused, or something in the model can't be modelled.
    """
    sys.argv[1:] = launch.words
    launch.set_environment()
    if launch.num_ranks is not None:
        os.environ["WORLD_SIZE"] = str(launch.num_ranks)
    torch.set_num_threads(1)
    with cpu_platform(), contextlib.redirect_stdout(io.StringIO()):  # Megatron prints all arguments
        run = modelled_run()
        variants = _variants(run, own.layers)
    lines = [*_head(run, own, launch), *_counts(variants), *_steps(run, variants, own)]
    if own.timeline is not None:
        lines.append(_write_timeline(variants[-1], own))
    return "\n".join(lines)


def _variants(run: ModelledRun, num_layers: int) -> list[Variant]:
    """Stock modules, ours in one chunk without deferral, and the plan."""
    plans: dict[str, Plan | None] = {"stock": None, "no overlap": plan_without_overlap(), "plan": run.plan}
    many = min(num_layers, run.num_layers)
    few = many if many == run.num_layers else many // 2
    _check_depth(run.plan, many, run.num_layers)
    variants = []
    for name, plan in plans.items():
        try:
            deep = _recorded(run, plan, many)
            shallow = deep if few == many else _recorded(run, plan, few)
        except NotImplementedError as error:
            raise UsageError(f"this model can't be modelled: {error}") from error
        variants.append(Variant(name, shallow, deep))
    return variants


def _recorded(run: ModelledRun, plan: Plan | None, num_layers: int) -> Depth:
    args = run.with_layers(num_layers)
    if plan is None or not plan.is_paired:
        return Depth(num_layers, record(args, plan))
    return Depth(num_layers, record(args, plan, _PAIRED_STEP), record(args, plan, _PAIRED_STEP - 1))


def _check_depth(plan: Plan, num_recorded: int, num_layers: int) -> None:
    if num_recorded < num_layers and (len(plan.segments) > 1 or plan.gaps):
        raise UsageError(
            f"the plan treats layers differently, so it needs all of them: pass --layers {num_layers}, or "
            "--lancet-num-chunks for a plan that treats all alike."
        )


def _device(own: argparse.Namespace, launch_us: float, connections: int | None) -> DeviceModel:
    device = DeviceModel(
        flops_per_s=own.tflops * 1e12,
        bytes_per_s=own.memory_gbytes_per_s * 1e9,
        min_kernel_us=own.min_kernel_us,
        collective_us=own.collective_us,
        host_wait_us=own.host_wait_us,
        connections=connections,
        link=own.link,
        message_sms=own.message_sms,
        persistent=own.message_sms > 0,
        carveout_sms=own.carveout_sms,
    )
    return device.with_launch_us(launch_us)


def _head(run: ModelledRun, own: argparse.Namespace, launch: Launch) -> list[str]:
    args = run.args
    recorded = min(own.layers, run.num_layers)
    scaled = "" if recorded == run.num_layers else f", scaled from {recorded // 2} and {recorded}"
    return [
        f"modelled, not measured: rank 0 of {run.num_ranks}, {args.micro_batch_size} x {args.seq_length} tokens, top "
        f"{args.moe_router_topk} of {args.num_experts} experts on {args.expert_model_parallel_size} ranks, uniform "
        f"routing, {run.num_layers} layers{scaled}",
        f"device: {own.tflops:g} TFLOP/s, {own.memory_gbytes_per_s:g} GB/s, at least {own.min_kernel_us:g} us a "
        f"kernel; links: {own.link}",
        f"plan: {run.plan}",
        *([] if launch.num_ranks is None else [f"launch: {launch.num_ranks} ranks ({launch.ranks_from})"]),
        *(f"note: {note}" for note in run.notes),
    ]


def _counts(variants: Sequence[Variant]) -> list[str]:
    rows = [["kernels per layer", "forward", "backward", "of it dW", "all", "host waits"]]
    for variant in variants:
        counts = variant.counts()
        numbers = (counts.forward, counts.backward, counts.weight_grads, counts.forward + counts.backward)
        rows.append([variant.name, *(f"{number:.0f}" for number in numbers), f"{counts.host_waits:.1f}"])
    return ["", *right_aligned(rows, (17, 8, 8, 8, 8, 10), " ")]


def _steps(run: ModelledRun, variants: Sequence[Variant], own: argparse.Namespace) -> list[str]:
    rows = [["launch us", "connections", *(f"{variant.name} ms" for variant in variants), "exposed share of the plan"]]
    widths = [9, 11, 10, 13, 10, 25]
    if run.plan.is_paired:
        rows[0].append("ends of a step ms")
        widths.append(17)
    for connections in own.connections:
        for launch_us in own.launch_us:
            steps = [one.step(_device(own, launch_us, connections), run.num_layers) for one in variants]
            times = [f"{step.step_ms:.2f}" for step in steps]
            ends = [f"{steps[-1].ends_ms:.2f}"] if run.plan.is_paired else []
            rows.append([f"{launch_us:g}", str(connections), *times, f"{100 * steps[-1].exposed_share:.1f} %", *ends])
    return ["", *right_aligned(rows, widths, " ")]


def _write_timeline(variant: Variant, own: argparse.Namespace) -> str:
    launch_us, connections = own.launch_us[0], own.connections[0]
    timeline = variant.timeline(_device(own, launch_us, connections))
    title = f"Modelled on a virtual GPU: {launch_us:g} us a launch, {connections} connections, links {own.link}"
    try:
        write_page(TimelineRecord(title, measured=(), predicted=(timeline,)), own.timeline)
    except OSError as error:
        raise UsageError(f"can't write {own.timeline}: {error.strerror or error}") from error
    return f"\n{own.timeline} written: the plan at {launch_us:g} us a launch with {connections} connections"
