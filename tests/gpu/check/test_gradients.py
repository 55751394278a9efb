"""The part of the check that compares each plan's gradients with stock's, three times."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.check.part import gradients
from benchmarks.gpu.record import Recorder, read_records
from benchmarks.gpu.variants import Runner, Work
from megatron_lancet.features.cuda_graphs.stage import StageGraphs
from megatron_lancet.patching import around
from megatron_lancet.runtime.rows import sums as row_sums
from megatron_lancet.runtime.weight_grad_store import DeferredWeight
from tests.gpu.check.rehearsed import rehearsed
from tests.ranks.launch import REPO

GQA, LATENT, FUSED = gradients.MODELS
IN_BF16 = ("ours k=2", "tiles", "dedup pairs")
"""Plans that are also compared in bf16: which bound counts there does not depend on the plan."""
WORKER = Path(__file__).with_name("rope_worker.py")


def gradients_of(models, *plans, **precisions):
    return partial(gradients.run, models=models, plans=plans or tuple(gradients.CASES), **precisions)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_each_plan_of_grouped_queries_equals_stock(tmp_path):
    (tmp_path / "bf16").mkdir()
    found = rehearsed(gradients_of([GQA], precisions=["fp32"]), tmp_path)
    found |= rehearsed(gradients_of([GQA], *IN_BF16, precisions=["bf16"]), tmp_path / "bf16")
    for precision, plans in (("fp32", gradients.CASES), ("bf16", IN_BF16)):
        assert found[f"{GQA}, {precision}, stock"]["repeats_equal"]
        for plan in plans:
            result = found[f"{GQA}, {precision}, {plan}"]
            assert "error" not in result
            assert result["gradient_error"] <= result["bound"]
            assert result["repeats_equal"]
            assert bool(result["not_deterministic"]) == (plan == gradients.ROW_SUMS)
    assert found[f"{GQA}, bf16, stock"]["widest_bound"] < gradients.BLIND_ABOVE
    assert found[f"{GQA}, fp32, ours k=2"]["bound"] == gradients.FP32_BOUND


def test_latent_attention_in_sequence_chunks_equals_stock(tmp_path):
    found = rehearsed(gradients_of([LATENT, FUSED], "ours k=2 sequence"), tmp_path)
    assert not [result for result in found.values() if "error" in result]
    assert set(found) == {
        FUSED,
        *(f"{LATENT}, {precision}, {of}" for precision in ("fp32", "bf16") for of in ("stock", "ours k=2 sequence")),
    }
    assert "TRITON_INTERPRET" in found[FUSED]["left_out"]


def test_fused_rope_of_latent_attention_runs_interpreted(tmp_path):
    """Another process: Triton decides at import whether it interprets."""
    file = tmp_path / "results.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, WORKER, file], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = {result["name"]: result for result in read_records(file)}
    assert f"{FUSED}, fp32, ours k=2 sequence" in found
    assert not [result for result in found.values() if "error" in result or "left_out" in result]


def test_doubled_weight_gradient_is_an_error(tmp_path):
    def twice(stock, weight, *args, **kwargs):
        for _ in range(2 if "linear_proj" in weight.name else 1):
            stock(weight, *args, **kwargs)

    with around(DeferredWeight, "add_product", twice):
        found = rehearsed(gradients_of([GQA], "ours k=1"), tmp_path)
    for precision in ("fp32", "bf16"):
        result = found[f"{GQA}, {precision}, ours k=1"]
        assert "linear_proj" in result["error"]
        assert result["gradient_error"] == pytest.approx(1, abs=0.1)
        assert "error" not in found[f"{GQA}, {precision}, stock"]


def test_repeats_that_differ_are_an_error(tmp_path):
    steps = []

    def step(stock, runner):
        losses = stock(runner)
        steps.append(runner)
        if runner.comm is not None and steps.count(runner) == 2:
            next(iter(runner.gradients().values())).mul_(1 + 1e-6)  # far below the bound
        return losses

    with around(Runner, "step", step):
        found = rehearsed(gradients_of([GQA], "ours k=1", precisions=["fp32"]), tmp_path)
    result = found[f"{GQA}, fp32, ours k=1"]
    assert "repeats of the same step differ" in result["error"]
    assert not result["repeats_equal"]
    assert 0 < result["repeats_difference"] < 1e-5
    assert result["gradient_error"] < result["bound"]


def test_graphs_that_are_not_replayed_are_an_error(tmp_path):
    """Gradients of eager steps are right, and so are repeats."""
    with around(StageGraphs, "capture", lambda *_: None):
        found = rehearsed(gradients_of([GQA], "graphs", "ours k=1", precisions=["fp32"]), tmp_path)
    assert found[f"{GQA}, fp32, graphs"]["error"] == "4 micro-batches were not replayed from graphs"
    assert "error" not in found[f"{GQA}, fp32, ours k=1"]


@pytest.mark.parametrize("runs", [True, False])
def test_kernel_that_sums_rows_must_run(tmp_path, runs):
    with nullcontext() if runs else around(row_sums, "_has_kernel", lambda *_: False):
        found = rehearsed(gradients_of([GQA], gradients.ROW_SUMS, precisions=["fp32"]), tmp_path)
    result = found[f"{GQA}, fp32, {gradients.ROW_SUMS}"]
    assert ("error" in result) != runs
    assert runs or "expected the kernel that sums rows" in result["error"]


def test_operator_that_is_not_deterministic_is_named(tmp_path):
    def step(stock, runner):
        if runner.comm is not None and not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError("sums_cuda does not have a deterministic implementation, but you set ...")
        return stock(runner)

    with around(Runner, "step", step):
        found = rehearsed(gradients_of([GQA], "ours k=1", precisions=["fp32"]), tmp_path)
    result = found[f"{GQA}, fp32, ours k=1"]
    assert "error" not in result
    assert result["not_deterministic"].startswith("sums_cuda does not have")
    assert "error" not in found[f"{GQA}, fp32, stock"]


def test_modes_are_restored():
    with gradients.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def saved(tmp_path, found, reference, bf16=False):
    record = Recorder(tmp_path / "one.jsonl", 10)
    gradients.save_comparison(record, "case", found, reference, Work(None, 8, 2, torch.device("cpu"), bf16))
    return json.loads((tmp_path / "one.jsonl").read_text())


def test_bounds_of_bf16_follow_from_stocks_error(tmp_path):
    truth = {"weight": torch.tensor([1.0, 0.0])}
    reference = gradients.Reference([1.0], truth, {"weight": 0.1})
    within, beyond = (gradients.Repeats([1.0], {"weight": torch.tensor([1.0, error])}) for error in (0.21, 0.23))
    assert "error" not in saved(tmp_path, within, reference, bf16=True)
    assert "0.23 away, at most 0.22" in saved(tmp_path, beyond, reference, bf16=True)["error"]


def test_loss_and_large_differences_of_repeats_are_errors(tmp_path):
    truth = {"weight": torch.ones(2)}
    reference = gradients.Reference([1.0], truth, {})
    wrong_loss = gradients.Repeats([1.001], truth)
    assert "a loss is" in saved(tmp_path, wrong_loss, reference)["error"]
    racing = gradients.Repeats([1.0], truth, False, 1e-3, "sums_cuda")
    assert "repeats differ by 0.001" in saved(tmp_path, racing, reference)["error"]
    missing = gradients.Repeats([1.0], {})
    assert "the gradient of weight is inf away" in saved(tmp_path, missing, reference)["error"]


def test_bounds_that_see_too_little_are_an_error(tmp_path):
    record = Recorder(tmp_path / "results.jsonl", limit_s=100)
    repeats = gradients.Repeats([1.0], {})
    one_of_ten = {f"w{i}": 0.01 for i in range(9)} | {"router": 0.3}
    gradients._save_stock(record, "stock", repeats, one_of_ten)
    gradients._save_stock(record, "wide", repeats, {**one_of_ten, "w0": 0.3})
    stock, wide = read_records(tmp_path / "results.jsonl")
    assert stock["blind"] == ["router"]
    assert "error" not in stock
    assert wide["error"].startswith("the bounds of 2 of 10 parameters")
