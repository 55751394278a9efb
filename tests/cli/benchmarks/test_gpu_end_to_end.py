"""The GPU benchmark from its command line to its file, at the size that a CPU can run; and what it refuses."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import LIMITS, check, parse_arguments
from benchmarks.gpu.variants import MEGATRON_OVERLAP, PLANS, STOCK
from megatron_lancet.errors import UsageError

REPO = Path(__file__).parents[3]


def bench(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *map(str, words)],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "results.json"
    done = bench("--size", "tiny", "--rounds", 3, "--warmup", 1, "--link", "100:0.005", "50:1", "--output", path)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


@pytest.mark.alone(setup=True)
def test_every_variant_runs_on_every_link(measured):
    output, results = measured
    assert [run["link"] for run in results["runs"]] == ["100 us, 0.005 GB/s", "50 us, 1 GB/s"]
    for run in results["runs"]:
        assert run["skipped"] == {}
        assert set(run["samples"]) == set(PLANS)
        for samples in run["samples"].values():
            assert len(samples["step_ms"]) == len(samples["exposed_ms"]) == 3
            assert min(samples["step_ms"].values()) > 0
    for name in PLANS:
        assert output.count(f"\n{name}  ") == 2
    assert output.endswith(LIMITS + "\n")


@pytest.mark.alone(setup=True)
def test_gradients_are_as_close_to_fp32_as_stock(measured):
    _, results = measured
    for run in results["runs"]:
        error = {name: samples["gradient_error"] for name, samples in run["samples"].items()}
        assert 1e-4 < error[STOCK] < 2e-2
        assert error[MEGATRON_OVERLAP] == error[STOCK]
        assert all(abs(found / error[STOCK] - 1) < 0.3 for found in error.values())


@pytest.mark.alone(setup=True)
def test_stock_waits_for_its_messages_and_ours_less(measured):
    """Two micro-batches of one MoE layer, two all-to-alls forward and two backward, of which 7/8 leave this rank."""
    _, results = measured
    size, slow = results["size"], results["runs"][0]
    rows = size["micro_batch"] * size["seq_length"] * size["top_k"]
    wire_ms = 2 * 4 * rows * size["hidden"] * 2 * 7 / 8 / (0.005 * 1e6)
    exposed_ms = {name: row["exposed_ms"] for name, row in slow["summary"].items()}
    assert wire_ms < exposed_ms[STOCK] < 3 * wire_ms
    assert exposed_ms["ours k=2"] < 0.9 * exposed_ms[STOCK]


@pytest.mark.alone(setup=True)
def test_the_file_says_where_it_comes_from(measured):
    _, results = measured
    assert results["versions"]["torch"] == version("torch")
    assert results["device"] == "CPU"
    assert results["command"].startswith("python -m benchmarks.gpu --size tiny")
    assert results["size"]["name"] == "tiny"


def test_one_micro_batch_leaves_megatrons_overlap_out():
    done = bench(
        "--size", "tiny", "--rounds", 2, "--warmup", 1, "--micro-batches", 1, "--variants", "stock", MEGATRON_OVERLAP
    )
    assert done.returncode == 0, done.stderr
    assert f"{MEGATRON_OVERLAP}  skipped: it overlaps two micro-batches, and a step has one" in done.stdout


def test_a_model_for_a_gpu_is_refused_without_one():
    done = bench("--size", "gpt2-s-moe")
    assert done.returncode == 2
    assert "--size gpt2-s-moe needs a CUDA device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--size", "tiny", "--micro-batch", "3"), "'experts k=4' cuts a micro-batch of 3 samples into 4 chunks"),
        (("--size", "tiny", "--link", "fast"), "LATENCY_US:GBYTES_PER_S"),
        (("--size", "tiny", "--link", "0:inf"), "is free"),
        (("--size", "tiny", "--rounds", "1"), "--rounds 1: expected at least 2"),
    ],
)
def test_what_it_refuses(words, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        check(parse_arguments(list(words)))


def test_one_connection_is_refused_on_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    check(parse_arguments(["--size", "tiny"]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="CUDA_DEVICE_MAX_CONNECTIONS is 1: mocked messages"):
        check(parse_arguments(["--size", "tiny"]))
