"""Measures compute and copy speed of one thread, to detect a slower host. Does not import torch.

A separate process multiplies two fixed matrices and copies a fixed array on one thread, as a rank does. Its figures
compare hosts, and the start of a benchmark with its end; they are not limits of the machine.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

MAX_CHANGE = 0.1
"""Largest relative change of either speed during a benchmark. Beyond it, the figures count as disturbed."""
_MATRIX_SIZE = 1024
_COPIED_BYTES = 128 << 20
_WARM_UP, _REPEATS = 2, 7
_PROCESSES = 7
"""A copy's speed depends on where a process gets its memory: two in a row differ by up to 15 %."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Speed:
    """Speed of one thread.

    Attributes:
        gemm_gflops: 10^9 operations per second in a product of two 1024 x 1024 fp32 matrices.
        copy_gb_per_s: size of a 128 MiB array over the time of its copy.
    """

    gemm_gflops: float
    copy_gb_per_s: float


def measured() -> Speed:
    """Measures the current speed: medians over processes, of the median of several repeats. Takes about 4 seconds."""
    command = [sys.executable, str(Path(__file__))]
    environment = {**os.environ, **_ONE_THREAD}
    found = []
    for _ in range(_PROCESSES):
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found.append(Speed(**json.loads(done.stdout)))
    return Speed(*(statistics.median(values) for values in zip(*map(astuple, found), strict=True)))


def compared(before: Speed, after: Speed) -> dict[str, Any]:
    """Returns both speeds, the larger relative change and whether it exceeds the limit, for the result file."""
    first, last = asdict(before), asdict(after)
    change = max(abs(last[name] / first[name] - 1) for name in first)
    return {
        **{f"{name}_{when}": speed[name] for name in first for when, speed in (("before", first), ("after", last))},
        "change": round(change, 4),
        "is_disturbed": change > MAX_CHANGE,
    }


def described(found: Mapping[str, Any]) -> str:
    """Describes the result of :func:`compared` in a sentence."""
    gemm, copy = (
        f"{found[f'{name}_before']:.1f} {unit} at the start and {found[f'{name}_after']:.1f} at the end"
        for name, unit in (("gemm_gflops", "GFLOP/s"), ("copy_gb_per_s", "GB/s"))
    )
    disturbed = (
        f" DISTURBED: a speed changed by {found['change']:.0%}, more than {MAX_CHANGE:.0%}; quote these figures only "
        "with this mark."
        if found["is_disturbed"]
        else ""
    )
    return f"Speed of one thread: a GEMM with {gemm}, a copy with {copy}.{disturbed}"


def _measure_here() -> Speed:
    import numpy as np

    size = _MATRIX_SIZE
    left, right = (np.full((size, size), value, np.float32) for value in (0.5, 0.25))
    product = np.empty_like(left)
    source = np.ones(_COPIED_BYTES // 4, np.float32)
    target = np.empty_like(source)
    return Speed(
        gemm_gflops=round(2 * size**3 / _median_s(lambda: np.matmul(left, right, out=product)) / 1e9, 2),
        copy_gb_per_s=round(_COPIED_BYTES / _median_s(lambda: np.copyto(target, source)) / 1e9, 2),
    )


def _median_s(run: Callable[[], object]) -> float:
    samples = []
    for _ in range(_WARM_UP + _REPEATS):
        start_s = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start_s)
    return statistics.median(samples[_WARM_UP:])


if __name__ == "__main__":
    print(json.dumps(asdict(_measure_here())))
