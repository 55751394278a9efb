"""Model, ranks, throughput and peak memory of a run, for the head of its report."""

import argparse
import datetime
import resource
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.training.training import num_floating_point_operations

from megatron_lancet.planning.sizes.gpus import gpu_of_device


def run_facts(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The model, the ranks, the device and today's date as plain values for ``report.json``."""
    experts = f", {args.num_experts} experts (top {args.moe_router_topk})" if args.num_experts else ""
    is_gpu = device.type == "cuda"
    return {
        "model": f"{args.num_layers} layers, hidden {args.hidden_size}{experts}, sequence {args.seq_length}",
        "num_ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name(device) if is_gpu else "CPU",
        "unit": "GPU" if is_gpu else "rank",
        "date": datetime.datetime.now().astimezone().date().isoformat(),
    }


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory of this rank so far: on a GPU allocated tensors, on a CPU the resident process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rates(args: argparse.Namespace, facts: dict[str, Any], step_ms: float, num_tokens: float | None) -> dict[str, Any]:
    """Floating-point operations a second and device, as Megatron counts them.

    Args:
        facts: :func:`run_facts`.
        num_tokens: of a step, with samples of ``--seq-length``; None where samples or documents have other lengths,
            which Megatron's count of a batch does not know.

    Returns:
        ``tflops_per_s``, and ``mfu``, its part of the device's peak in bf16; each None where it is not known.
    """
    if num_tokens is None:
        return {"tflops_per_s": None, "mfu": None}
    flops = num_floating_point_operations(args, num_tokens / args.seq_length)
    per_s = float(flops) / (step_ms / 1e3) / facts["num_ranks"]
    gpu = gpu_of_device(facts["device"]) if args.bf16 or args.fp16 else None
    return {"tflops_per_s": per_s / 1e12, "mfu": None if gpu is None else per_s / gpu.flops_per_s}
