"""Scripts of single parts, small: they run, keep every sample, and their files say where they come from."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.harness.samples import Spread
from benchmarks.parts.frame import paired_ratios, timed_pairs
from tests.cli.benchmarks.runs import run_bench


def measured(tmp_path: Path, script: str, *arguments: str, ranks: int = 1) -> dict:
    """The script's result file."""
    path = tmp_path / "result.json"
    launcher = [] if ranks == 1 else ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
    run_bench(f"parts.{script}", *arguments, "--output", path, launcher=launcher, OMP_NUM_THREADS="1")
    found = json.loads(path.read_text())
    assert found["command"].startswith(f"python -m benchmarks.parts.{script} {' '.join(arguments)}")
    assert found["versions"]["torch"] == version("torch")
    assert found["settings"]["OMP_NUM_THREADS"] == "1"
    assert {"date", "commit", "is_dirty", "machine"} <= set(found)
    speed = found["machine_speed"]
    assert all(speed[f"{name}_{when}"] > 0 for name in ("gemm_gflops", "copy_gb_per_s") for when in ("before", "after"))
    return found


def test_weight_grad_keeps_a_sample_per_variant_and_repeat(tmp_path):
    for entry in measured(tmp_path, "weight_grad", "--repeats", "2")["cases"]:
        assert set(entry["samples_us"]) == set(entry["results"])
        assert all(len(times) == 2 and min(times) > 0 for times in entry["samples_us"].values())


def test_plan_time_measures_every_case_and_compares_searches(tmp_path):
    found = measured(tmp_path, "plan_time", "--layers", "2", "--repeats", "1", "--models", "1")
    assert len(found["cases"]) == 16
    assert all(len(case["plan_s"]) == 1 for case in found["cases"])
    assert all(ratio >= 1 - 1e-9 for ratio in found["ratio_to_whole_search"])
    assert len(found["ratio_to_whole_search"]) == 1


@pytest.mark.distributed
def test_transport_keeps_pairs_of_each_skew(tmp_path):
    arguments = ["--megabytes", "0.1", "--skew-ms", "0", "2", "--repeats", "2"]
    samples = measured(tmp_path, "transport", *arguments, ranks=2)["samples_ms"]
    assert set(samples) == {"0.0", "2.0"}
    assert all(
        {name: len(times) for name, times in pair.items()} == {"gloo": 2, "per-sender": 2} for pair in samples.values()
    )


def test_variants_take_turns_and_their_ratios_are_paired():
    ran: list[str] = []

    def variant(name: str, times: list[float]):
        def run() -> float:
            ran.append(name)
            return times.pop(0)

        return run

    samples = timed_pairs({"a": variant("a", [4.0, 8.0, 12.0]), "b": variant("b", [2.0, 2.0, 2.0])}, 3)
    assert samples == {"a": [4.0, 8.0, 12.0], "b": [2.0, 2.0, 2.0]}
    assert [set(ran[start : start + 2]) for start in (0, 2, 4)] == [{"a", "b"}] * 3
    assert paired_ratios(samples["a"], samples["b"]) == Spread(4.0, 2.0, 6.0)
