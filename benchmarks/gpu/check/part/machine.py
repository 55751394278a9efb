"""Describes the machine: devices, driver, versions, and installed packages."""

import importlib.util
import platform
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.record import Recorder

if TYPE_CHECKING:
    from benchmarks.gpu.check.place import Place

_QUERY = "name,driver_version,memory.total,clocks.max.sm,power.limit"
_PACKAGES = ("megatron.core", "transformer_engine", "apex", "flash_attn", "triton")


def run(record: Recorder, place: "Place") -> None:
    """Saves ``versions``, ``devices`` and ``packages``."""
    record.add(
        "versions",
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        python=platform.python_version(),
        megatron_core=_megatron(),
    )
    record.add("packages", **{name: importlib.util.find_spec(name) is not None for name in _PACKAGES})
    record.add("devices", devices=[place.name] if place.is_rehearsal else _devices(), smi=_smi())


def _megatron() -> str:
    import megatron.core

    return str(megatron.core.__version__)


def _devices() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": device.name,
                "memory_gb": round(device.total_memory / 1e9, 1),
                "sms": device.multi_processor_count,
                "capability": f"{device.major}.{device.minor}",
            }
        )
    return found


def _smi() -> list[str]:
    """Driver, memory, clock and power limit of each device; empty where the tool is missing."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    return done.stdout.strip().splitlines()
