"""The GPU benchmark's code for a device, at its smallest size: streams, events, the profiler's trace, the table."""

import math
from contextlib import nullcontext

import pytest
import torch

from benchmarks.gpu.__main__ import parse_arguments, run, summaries
from benchmarks.gpu.check.place import counting_clock
from benchmarks.gpu.record import Recorder, read_records
from benchmarks.gpu.sizes import SIZES
from benchmarks.gpu.variants import STOCK, Work
from megatron_lancet.testkit.mock.link import Link
from tests.gpu.devices import ON_BOTH

OURS = "ours k=2"
NUM_RANKS, NUM_MICRO_BATCHES = 8, 2
MESSAGES = {STOCK: 7 * NUM_MICRO_BATCHES, OURS: 2 * 5 * NUM_MICRO_BATCHES}
"""Of the one MoE layer: counts, and forward and backward dispatch and combine; stock sends probabilities apart."""


@ON_BOTH
def test_benchmark_measures_stock_and_a_plan_on_the_device(device, tmp_path, capsys):
    words = ["--size", "tiny", "--rounds", "2", "--warmup", "1", "--traced", "1", "--variants", STOCK, OURS]
    work = Work(SIZES["tiny"], NUM_RANKS, NUM_MICRO_BATCHES, torch.device("cuda"))
    record = Recorder(tmp_path / "records.jsonl", limit_s=math.inf)
    with device.mocked_link(), counting_clock(device.gpu) if device.is_virtual else nullcontext():
        run(work, [Link(latency_us=100, gbytes_per_s=0.01)], parse_arguments(words), record)
    (found,) = summaries(read_records(tmp_path / "records.jsonl"))
    assert found["link"] == "100 us, 0.01 GB/s"
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
