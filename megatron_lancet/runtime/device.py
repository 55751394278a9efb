"""Tells whether the kernels of a tensor run on a CUDA stream, and which kernels its device has."""

from functools import cache

import torch


def on_cuda(tensor: torch.Tensor) -> bool:
    """Whether kernels on ``tensor`` are enqueued on the current CUDA stream instead of run by the caller."""
    return _is_cuda(tensor.device)


def _is_cuda(device: torch.device) -> bool:
    # The virtual GPU replaces this function: its tensors are in the host's memory.
    return device.type == "cuda"


def has_grouped_gemm(tensor: torch.Tensor) -> bool:
    """Whether ``torch.nn.functional.grouped_mm`` multiplies all groups of tensors like this one in one kernel.

    On a GPU that is so for bf16 with compute capability 9 and 10 (Hopper, Blackwell of data centers). For others torch
    copies the offsets to the host, which waits, and multiplies group by group (``GroupedMMUtils.h`` of torch 2.13).
    """
    if tensor.device.type != "cuda":
        return True
    return torch.version.hip is None and tensor.dtype is torch.bfloat16 and _major_capability(tensor.device) in (9, 10)


@cache
def _major_capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def to_device(on_host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor to a device; the host does not wait for the copy."""
    if device.type != "cuda":
        return on_host.to(device)
    return on_host.pin_memory().to(device, non_blocking=True)
