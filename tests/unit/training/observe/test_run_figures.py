"""Figures of a device: Megatron's count of operations over time and ranks, and the peak of devices that are known."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lancet.training.observe import run_figures, step_recorder
from megatron_lancet.training.observe.run_figures import peak_memory_bytes, rates
from megatron_lancet.training.observe.step_recorder import StepRecorder
from tests.fakes import cpu_stats


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Megatron's count is 10^15 operations for a sample."""
    monkeypatch.setattr(run_figures, "num_floating_point_operations", lambda args, batch_size: 1e15 * batch_size)


def args(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{"seq_length": 128, "bf16": True, "fp16": False, **changes})


def facts(device: str) -> dict:
    return {"num_ranks": 4, "device": device}


def test_operations_are_of_one_device_and_second():
    found = rates(args(), facts("NVIDIA H100 80GB HBM3"), 2000.0, 8 * 128.0)
    assert found["tflops_per_s"] == pytest.approx(1000)  # 8 samples in 2 s on 4 devices
    assert found["mfu"] == pytest.approx(1000 / 989)


@pytest.mark.parametrize(("device", "changes"), [("CPU", {}), ("NVIDIA H100 80GB HBM3", {"bf16": False})])
def test_utilisation_needs_a_known_peak(device, changes):
    found = rates(args(**changes), facts(device), 2000.0, 8 * 128.0)
    assert found["tflops_per_s"] == pytest.approx(1000)
    assert found["mfu"] is None


def test_documents_are_not_counted_as_whole_samples(monkeypatch):
    monkeypatch.setattr(step_recorder, "run_facts", lambda *_: facts("CPU"))
    for is_packed, tflops in ((False, 1000), (True, None)):
        settings = args(dataloader_inter_document_masking=is_packed)
        recorder = StepRecorder(settings, torch.device("cpu"), cpu_stats())
        report = {"ranks": [{"num_tokens": 8 * 128.0, "peak_memory_bytes": 1}], "step_ms": 2000.0}
        assert recorder._figures(report, None)["tflops_per_s"] == tflops


def test_samples_of_other_lengths_are_not_counted():
    assert rates(args(), facts("CPU"), 2000.0, None) == {"tflops_per_s": None, "mfu": None}


def test_peak_on_a_cpu_is_of_the_process():
    kept = torch.ones(8_000_000)  # 32 MB
    assert peak_memory_bytes(torch.device("cpu")) > kept.nbytes
