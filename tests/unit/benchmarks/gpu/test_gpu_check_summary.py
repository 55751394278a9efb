"""The page of the check on a GPU, from the results of its parts; and as documents quote it."""

import json

import pytest

from benchmarks.gpu.check import quote
from benchmarks.gpu.check.parts import PARTS
from benchmarks.gpu.check.predict.file import committed, hash_of, read_prediction
from benchmarks.gpu.check.summary import measured, written
from benchmarks.quoted import beside, results

COMMIT = "0123456789abcdef"
TITLES = {part.name: part.title for part in PARTS}


def step(variant, link, at, ms):
    return {"name": "step", "variant": variant, "link": link, "round": at, "step_ms": ms, "peak_mb": 7.0}


TIMING = [
    {"name": "gradients", "variant": "stock", "relative_error": 0.1},
    {"name": "gradients", "variant": "pairs", "relative_error": 0.1},
    {"name": "variant", "variant": "megatron 1f1b", "skipped": "ValueError: needs more"},
    *(step("stock", "10 us, 45 GB/s", at, ms) for at, ms in enumerate((290.0, 300.0, 310.0))),
    *(step("pairs", "10 us, 45 GB/s", at, ms) for at, ms in enumerate((200.0, 200.0, 200.0))),
    *(step("stock", "free", at, 150.0) for at in range(3)),
    step("tiles", "10 us, 45 GB/s", 0, 1.0),
    {"name": "step", "variant": "tiles", "error": "OutOfMemoryError: 80 GB"},
    {"name": "trace", "variant": "pairs", "link": "10 us, 45 GB/s", "wire_ms": 9.0, "exposed_ms": 5.0, "idle_ms": 2.0},
]
RECORDS = {
    "machine": [
        {"name": "versions", "torch": "2.11.0", "nccl": "2.28.9"},
        {"name": "devices", "devices": [{"name": "NVIDIA H100"}, {"name": "NVIDIA H100"}]},
    ],
    "smoke": [
        {"name": "ours k=2", "waits": 8, "waits_expected": 8, "waits_per_layer_and_chunk": 1.0},
        {"name": "tiles", "waits": 9, "waits_expected": 8, "waits_per_layer_and_chunk": 2.25, "error": "9, expected 8"},
        {"name": "stock", "waits": 44, "waits_expected": None, "waits_per_layer_and_chunk": 11.0},
    ],
    "gradients": [
        {
            "name": f"latent attention, fp32, {plan}",
            "gradient_error": error,
            "bound": 1e-4,
            "error_of_bound": error / 1e-4,
            "parameter": "w",
            "repeats_equal": True,
        }
        for plan, error in (("pairs", 1e-7), ("tiles", 3e-7))
    ],
    "timing": TIMING,
    "ranks": [{"name": "ranks", "shows": "Two ranks on one device."}, {"name": "gradients k", "error_vs_stock": 2e-7}],
    "link": [
        {"name": "1 MB at 45 GB/s, 16 SMs", "blocks": 16, "expected_us": 32.0, "measured_us": 35.0, "launch_us": 2.5},
        {"name": "highest rate of 16 SMs", "gbytes_per_s": 500.0, "measured_us": 1.0},
    ],
    "host_time": [{"name": "pairs", "us_per_layer": 410.0, "groups_us": {"messages": 110.0}, "kernels_per_layer": 161}],
    "memcheck": [{"name": "memcheck", "runs": False, "why": "compute-sanitizer is missing"}],
}


def result(records, is_rehearsal=False):
    parts = [
        {"name": name, "title": TITLES[name], "status": 0, "seconds": 3.0, "why": "", "records": found}
        for name, found in records.items()
    ]
    prediction = {"device": "H100", "sha256": "abc", **read_prediction(committed("H100"))}
    head = {"date": "2026-12-01", "commit": COMMIT, "is_dirty": False, "is_rehearsal": is_rehearsal}
    return {**head, "prediction": prediction, "parts": parts}


def test_the_page_has_each_part_in_short():
    page = written(result(RECORDS))
    assert page.startswith("# The check on a GPU: 2 x NVIDIA H100\n\n2026-12-01, commit 0123456789ab; torch 2.11.0")
    assert "SHA-256 `abc`" in page
    assert "| 10 us, 45 GB/s | pairs | 200.0 | 1.50 (1.48-1.52)" in page
    assert "megatron 1f1b was left out: ValueError: needs more" in page
    assert "- `timing` step tiles: OutOfMemoryError: 80 GB" in page
    assert "- `smoke` tiles: 9, expected 8" in page
    assert "once for each layer and chunk in 1 of them" in page
    assert "| latent attention, fp32 | 2 | 3.0e-07 | 1.0e-04 | `w` | 2 of 2 |" in page
    assert "Two ranks on one device." in page
    assert "| 45 GB/s, 16 SMs | 1 | 0.5 us | 32.0 |" in page
    assert "highest rate of 16 SMs: 500 GB/s" in page
    assert "| messages | 110 |" in page
    assert len(page.splitlines()) < 130


def test_predicted_is_beside_measured_with_the_error():
    prediction = read_prediction(committed("H100"))
    modelled = prediction["variants"]["pairs"]["10:45"]["modelled"]["step_ms"]
    found = measured(TIMING, ["10:350", "10:45"])
    assert found == {
        "stock": {"10:45": {"step_ms": 300.0, "exposed_ms": None}},
        "pairs": {"10:45": {"step_ms": 200.0, "exposed_ms": 5.0}},
        "ideal": {"10:45": {"step_ms": 150.0, "exposed_ms": None}},
    }
    page = written(result(RECORDS))
    assert f"| 10:45 | pairs | 200.0 | {modelled:.1f} ({100 * (modelled / 200 - 1):+.0f} %)" in page
    assert "| 67 % |" in page  # hidden: (300 - 200) / (300 - 150)


def test_the_page_can_lack_the_times_of_stock():
    """A part may end early, or stock fail."""
    steps = [{"name": "steps", "variant": "pairs", "median_ms": 5.0, "speedup": None, "rounds": 1}]
    failed = [*TIMING, {"name": "step", "variant": "stock", "error": "OutOfMemoryError: 80 GB"}]
    page = written(result({**RECORDS, "ranks": steps, "timing": failed}))
    assert "| pairs | 5.0 | - | 1 |" in page
    assert "stock was left out: OutOfMemoryError: 80 GB" in page
    assert "| pairs | 200.0 |" not in page


def test_rehearsal_says_that_its_figures_mean_nothing():
    page = written(result(RECORDS, is_rehearsal=True))
    assert "no figure means anything" in page
    assert "| 10:45 | pairs |" not in page


def test_documents_quote_the_newest_check_or_the_prediction(tmp_path, monkeypatch):
    def cached():
        results.result.cache_clear()

    monkeypatch.setattr(results, "_RESULTS", tmp_path)
    monkeypatch.setattr(beside, "RESULTS", tmp_path)
    cached()
    assert hash_of(committed("H100")) in quote.gpu_check()
    machine_speed = {"is_disturbed": False}
    whole = {**result(RECORDS), "machine_speed": machine_speed}
    (tmp_path / "gpu-check-2026-12-01.json").write_text(json.dumps(whole))
    text = quote.gpu_check()
    assert text.startswith("2 x NVIDIA H100; 2026-12-01, commit 0123456789ab; torch 2.11.0")
    link = "[samples](../benchmarks/results/gpu-check-2026-12-01.json)"
    assert f"**Steps of each plan in turns** ({link})\n" in text
    assert "| pairs | 200.0 |" in text
    beside.write()
    assert (tmp_path / "gpu-check-2026-12-01.md").read_text() == written(whole)
    cached()


@pytest.mark.parametrize("name", TITLES)
def test_a_part_without_results_has_no_section(name):
    assert "## " not in written(result({name: []}))
