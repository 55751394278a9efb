"""The benchmark of one MoE layer, on its quickest case: outputs and gradients are compared inside."""

import importlib.util
import json

import pytest

from tests.cli.benchmarks.runs import run_bench


@pytest.mark.nightly
def test_layers_are_compared_and_measured(tmp_path):
    path = tmp_path / "results.json"
    output, _ = run_bench("parts.moe_layer", "--cases", 3, "--repeats", 2, "--output", path, OMP_NUM_THREADS="1")
    (case,) = json.loads(path.read_text())["cases"]
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    assert set(case["summary"]) == {"stock", "ours k=1", "ours k=2"} | ({"deepspeed"} if has_deepspeed else set())
    assert case["summary"]["ours k=1"]["deviation"] == 0
    assert 0 < case["summary"]["ours k=2"]["deviation"] < 1e-5
    assert all(len(times) == 2 and min(times) > 0 for times in case["samples_ms"].values())
    skipped = "skipped: deepspeed is not installed (pip install megatron-lancet[peers])"
    assert (skipped in output) == (not has_deepspeed)
