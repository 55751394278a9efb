"""GPUs by their data sheets. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Gpu:
    """A GPU, by its data sheet.

    Attributes:
        flops_per_s: dense matrix products in bf16.
        bytes_per_s: memory traffic.
        nvlink_gbps: Gb/s to other GPUs of its node, each way.
        num_sms: multiprocessors.
        memory_bytes: size of its memory.
    """

    flops_per_s: float
    bytes_per_s: float
    nvlink_gbps: float
    num_sms: int
    memory_bytes: float


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "a100": Gpu(312e12, 2.04e12, 2400, 108, 80e9),
        "h100": Gpu(989e12, 3.35e12, 3600, 132, 80e9),
        "h200": Gpu(989e12, 4.8e12, 3600, 132, 141e9),
        "b200": Gpu(2250e12, 8e12, 7200, 148, 180e9),
    }
)
"""NVIDIA's data sheets of the SXM modules: products without sparsity, NVLink each way."""
_OTHER_MODULES = {"pcie", "nvl"}
"""Words in the names of slower modules of the same chip."""


def gpu_of_device(name: str) -> Gpu | None:
    """The data sheet of a device.

    Args:
        name: as the driver gives it, for example ``NVIDIA H100 80GB HBM3``.

    Returns:
        None for a device that is not in :data:`GPUS`, PCIe cards of the same chips among them.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    if _OTHER_MODULES.intersection(words):
        return None
    return next((gpu for key, gpu in GPUS.items() if key in words), None)
