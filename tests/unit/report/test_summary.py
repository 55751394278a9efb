import json
from datetime import timedelta

import pytest
import torch

from megatron_lancet.features.tuning.report import tuning_text
from megatron_lancet.features.two_hop.feature import ActiveNodes
from megatron_lancet.report.summary import StepRecord, as_text, rank_medians, summarise, write_json
from megatron_lancet.runtime.comm_stats import CommStats, CommTimes
from megatron_lancet.schedule.nodes import Nodes

REQUIRED_KEYS = {"tokens_per_s", "step_ms", "all_to_all_ms", "exposed_ms", "counts_exposed_ms", "plan"}


def record(step_ms: float, exposed_ms: float = 10.0) -> StepRecord:
    return StepRecord(step_ms, 2048, CommTimes(all_to_all_ms=40.0, exposed_ms=exposed_ms, counts_exposed_ms=2.0))


def test_summary_leaves_warm_up_steps_out():
    steps = [record(1000), record(900), record(800), record(100), record(110), record(120)]
    assert rank_medians(steps)["step_ms"] == 110


def test_summary_of_a_run_shorter_than_the_warm_up_has_all_steps():
    assert rank_medians([record(300), record(100)])["step_ms"] == 200
    assert summarise([rank_medians([record(300)])], "off", 1)["num_warm_up_steps"] == 0


def test_summary_step_time_is_that_of_the_slowest_rank():
    ranks = [rank_medians([record(100, exposed_ms=10)] * 5), rank_medians([record(200, exposed_ms=30)] * 5)]
    report = summarise(ranks, "chunks=2", 5)
    assert report.keys() >= REQUIRED_KEYS
    assert report["step_ms"] == 200
    assert report["tokens_per_s"] == pytest.approx(2048 / 0.2)
    assert report["exposed_ms"] == 20
    assert report["ranks"] == ranks


def test_summary_text_names_plan_and_exposed_share():
    report = summarise([rank_medians([record(100)] * 5)], "chunks=2 dim=batch", 5)
    text = as_text(report)
    assert "chunks=2 dim=batch" in text
    assert "medians over steps 4 to 5" in text
    assert "10.0 ms waited for payload, 2.0 ms for counts: 12.0 % of the step" in text


def test_summary_reports_the_highest_peak_of_any_step_and_rank():
    def rank(*peaks_mb):
        comms = [CommTimes(num_dw_in_gaps=7, num_dw_early=2, num_dw_late=1, peak_dw_bytes=p * 10**6) for p in peaks_mb]
        return rank_medians([StepRecord(100, 2048, comm) for comm in comms])

    report = summarise([rank(9, 1, 1, 3, 3, 5), rank(2, 2, 2, 8, 2, 2)], "chunks=2", 6, dw_memory_bytes=10**7)
    assert (report["peak_dw_bytes"], report["dw_memory_bytes"]) == (9_000_000, 10_000_000)
    line = "7 of 10 in front of waits for all-to-alls, at most 9.0 MB deferred"
    assert f"{line} of 10.0 MB, 2 ran early" in as_text(report)
    assert as_text(summarise([rank(9)], "chunks=2", 6)).endswith(line)


def test_summary_says_what_left_the_node_where_that_is_known():
    comm = CommTimes(payload_bytes=8e6, between_nodes_bytes=3e6, between_nodes_rows=99, num_routed_tokens=100)
    report = summarise([rank_medians([StepRecord(100, 2048, comm)])], "chunks=1", 1)
    line = "between nodes      3.0 of the 8.0 MB that a rank sends in a step; 0.99 rows of each token and layer"
    cpu = torch.device("cpu")
    nodes = ActiveNodes(Nodes(2, 2), cpu, CommStats(cpu), timedelta(minutes=1))
    assert list(nodes.lines(report)) == [line]
    assert list(nodes.lines({**report, "between_nodes_bytes": 0.0})) == []


def test_summary_json_is_written_atomically(tmp_path):
    report = summarise([rank_medians([record(100)] * 5)], "off", 5)
    path = write_json(report, tmp_path / "new" / "folder")
    assert json.loads(path.read_text()) == report
    assert [p.name for p in path.parent.iterdir()] == ["report.json"]


RUN = {"model": "4 layers, hidden 256", "num_ranks": 8, "device": "NVIDIA H100", "unit": "GPU", "date": "2026-11-27"}


def test_summary_text_begins_with_what_the_plan_brought():
    report = summarise([rank_medians([record(100)] * 5)], "chunks=2", 5)
    verdict = "1.42x faster than without overlap"
    text = as_text({**report, "verdict": verdict, "plan_text": "two chunks (chunks=2)", "run": RUN})
    assert text.splitlines()[:3] == [
        "Megatron-Lancet report: 1.42x faster than without overlap",
        "  run                4 layers, hidden 256; 8 ranks on NVIDIA H100s; 2026-11-27",
        "  plan               two chunks (chunks=2)",
    ]


@pytest.mark.parametrize(
    ("figures", "throughput", "memory"),
    [
        (
            {"run": RUN, "tflops_per_s": 412.34, "mfu": 0.417, "peak_memory_bytes": 61_200_000_000},
            "10240 tokens/s a GPU, 20480 in all; 412.3 TFLOP/s a GPU as Megatron counts, 41.7 % of its peak in bf16 "
            "(MFU)",
            "61.20 GB a GPU at most, allocated",
        ),
        (
            {"run": {**RUN, "unit": "rank"}, "tflops_per_s": 0.0151, "mfu": None, "peak_memory_bytes": 1_280_000_000},
            "10240 tokens/s a rank, 20480 in all; 0.0151 TFLOP/s a rank as Megatron counts",
            "1.28 GB a rank at most, of the process, resident",
        ),
        (
            {"run": RUN, "tflops_per_s": None, "mfu": None, "peak_memory_bytes": 10**9},
            "10240 tokens/s a GPU, 20480 in all",
            "1.00 GB a GPU at most, allocated",
        ),
    ],
    ids=["known GPU", "CPU", "samples of other lengths"],
)
def test_summary_text_has_figures_of_a_device(figures, throughput, memory):
    report = summarise([rank_medians([record(100)] * 5)] * 2, "chunks=2", 5)
    lines = as_text({**report, **figures}).splitlines()
    assert f"  throughput         {throughput}" in lines
    assert f"  peak memory        {memory}" in lines


def test_summary_text_says_how_the_plan_was_found():
    report = summarise([rank_medians([record(100)] * 5)], "chunks=2 dim=batch", 5, first_step=21)
    figures, chosen = {"step_ms": 150.0, "exposed_ms": 40.0}, {"step_ms": 110.0, "exposed_ms": 4.0}
    tuning = {"how": "planned", "num_plans": 2, "baseline": figures, "predicted": None, "chosen": chosen}
    assert "when chosen" not in "".join(tuning_text({**tuning, "chosen": figures}))
    text = as_text(report, tuning_text(tuning))
    assert "medians over steps 24 to 25" in text
    assert (
        "  tuning             planned, planned 2 times\n"
        "    without overlap  150.0 ms a step, 40.0 ms of it exposed\n"
        "    when chosen      110.0 ms a step, 4.0 ms of it exposed\n"
    ) in text
