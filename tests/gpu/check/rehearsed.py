"""Runs a part of the check in a rehearsal, in this process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gpu.check.place import Place, rehearsal
from benchmarks.gpu.record import Recorder, read_records
from megatron_lancet.training.platform.cpu import gpu_available
from megatron_lancet.training.platform.cuda_connections import CONNECTIONS

LIMIT_S = 600.0


def all_of(part: Callable[[Recorder, Place], None], folder: Path, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """The results of a part, in order."""
    if gpu_available():
        pytest.skip("a rehearsal runs where no device is seen")
    record = Recorder(folder / "results.jsonl", limit_s)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small
    try:
        with mock.patch.dict("os.environ"), rehearsal() as place, record.guarded("part"):
            part(record, place)
    finally:
        torch.set_num_threads(num_threads)
    results = read_records(folder / "results.jsonl")
    assert record.num_errors == sum("error" in result for result in results)
    return results


def rehearsed(
    part: Callable[[Recorder, Place], None], folder: Path, limit_s: float = LIMIT_S
) -> dict[str, dict[str, Any]]:
    """The results of a part, by name."""
    results = all_of(part, folder, limit_s)
    found = {result["name"]: result for result in results}
    assert len(found) == len(results), "two results have one name"
    return found


def rehearsed_command(part: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The results of a part that is run as the check runs it; it must have no errors."""
    if gpu_available():
        pytest.skip("a rehearsal runs where no device is seen")
    file = folder / "results.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu.check", part, str(file), "--limit", str(LIMIT_S), "--rehearse"]
    inherited = {name: value for name, value in os.environ.items() if name != CONNECTIONS}
    inherited["OMP_NUM_THREADS"] = "1"  # tensors are small
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, timeout=LIMIT_S)
    results = read_records(file)
    errors = [result for result in results if "error" in result]
    assert done.returncode == 0, f"{errors}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    assert not errors
    return {result["name"]: result for result in results}
