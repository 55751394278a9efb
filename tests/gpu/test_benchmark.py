"""The GPU benchmark's code for a device, at its smallest size: streams, events, the profiler's trace, the table."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import measure
from benchmarks.gpu.__main__ import parse_arguments, run
from benchmarks.gpu.sizes import SIZES
from benchmarks.gpu.variants import STOCK, Work
from megatron_lancet.mock.link import Link
from megatron_lancet.patching import replaced
from megatron_lancet.virtual_gpu.log import Kernel
from tests.gpu.devices import ON_BOTH

OURS = "ours k=2"
NUM_RANKS, NUM_MICRO_BATCHES = 8, 2
MESSAGES = {STOCK: 7 * NUM_MICRO_BATCHES, OURS: 2 * 5 * NUM_MICRO_BATCHES}
"""Of the one MoE layer: counts, and forward and backward dispatch and combine; stock sends probabilities apart."""


class VirtualProfile:
    """In place of torch.profiler on the virtual GPU: a kernel a microsecond, one after the other."""

    def __init__(self, gpu):
        self._gpu = gpu

    def __enter__(self):
        self._watch = self._gpu.watch()
        self._watch.__enter__()
        return self

    def __exit__(self, *error):
        return self._watch.__exit__(*error)

    def export_chrome_trace(self, path):
        kernels = [entry for entry in self._gpu.log if isinstance(entry, Kernel)]
        events = [
            {
                "ph": "X",
                "cat": "kernel",
                "name": kernel.name,
                "ts": start,
                "dur": 1,
                "args": {"stream": kernel.stream},
            }
            for start, kernel in enumerate(kernels)
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}))


@contextmanager
def times_of(device):
    """Where nothing takes time, all steps take as long."""
    if not device.is_virtual:
        yield
        return
    with (
        replaced(torch.profiler, "profile", lambda **_: VirtualProfile(device.gpu)),
        replaced(device.gpu.Event, "elapsed_time", lambda *_: 1.0),
    ):
        yield


@ON_BOTH
def test_benchmark_measures_stock_and_a_plan_on_the_device(device, monkeypatch, capsys):
    monkeypatch.setattr(measure, "_NUM_PROFILED", 1)
    args = parse_arguments(["--size", "tiny", "--rounds", "2", "--warmup", "1", "--variants", STOCK, OURS])
    work = Work(SIZES["tiny"], NUM_RANKS, NUM_MICRO_BATCHES, torch.device("cuda"))
    with device.mocked_link(), times_of(device):
        found = run(work, Link(latency_us=100, gbytes_per_s=0.01), args)
    assert list(found["summary"]) == [STOCK, OURS]
    for name, row in found["summary"].items():
        assert row["step_ms"] > 0
        assert 0 < row["exposed_ms"] <= row["wire_ms"]
        assert row["gradient_error"] < 0.05
        if device.is_virtual:
            assert row["wire_ms"] == pytest.approx(1e-3 * MESSAGES[name])
        else:
            assert row["wire_ms"] > 0.1 * MESSAGES[name]  # 100 us of latency each, unless two overlap
    assert OURS in capsys.readouterr().out
