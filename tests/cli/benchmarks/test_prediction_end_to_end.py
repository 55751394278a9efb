"""The prediction benchmark on a real, small network: it profiles, predicts, runs, and writes all of it."""

from itertools import groupby
from pathlib import Path

import pytest

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.files.reader import from_plain
from megatron_lancet.lab.views.trace_file import read_trace
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.simulator import simulate
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import Plan
from tests.cli.benchmarks.runs import run_on_network

CONFIGURATIONS = ["k1", "experts-k4-dw", "sequence-k2-dw", "planned"]


@pytest.mark.distributed
@pytest.mark.alone
@pytest.mark.usefixtures("shaped_network")
def test_run_predicts_from_its_profile_and_measures_same_plans(tmp_path):
    (tmp_path / "timelines").mkdir()
    chosen = ["--cases", "skewed", "--configurations", *CONFIGURATIONS, "--timelines", str(tmp_path / "timelines")]
    output, result, tables = run_on_network("prediction", tmp_path, *chosen)
    assert "4 configurations: error of the step time" in output
    (case,) = result["cases"]
    assert list(case["predictions"]) == CONFIGURATIONS
    profile = from_plain(Profile, case["profile"], "profile")
    assert profile.received_share[0] > 0.53, "two experts of four are on the first rank, one of them gets 40 %"
    for name, prediction in case["predictions"].items():
        plan = from_plain(Plan, case["plans"][name], name)
        assert simulate(profile, plan).prediction.step_ms == pytest.approx(prediction["step_ms"])
        samples = case["samples"][name]
        assert [len(ranks) for ranks in samples] == [2, 2]
        record = read_trace(tmp_path / "timelines" / f"skewed-{name}.json")
        assert [timeline.rank for timeline in record.measured] == [0, 1]
        computed = {span.name for span in record.measured[0].spans if span.name.endswith(".experts")}
        assert computed == {span.name for span in record.predicted[0].spans if span.name.endswith(".experts")}
    assert "| experts-k4-dw |" in tables


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.alone
@pytest.mark.usefixtures("shaped_network")
def test_paired_plans_are_predicted_from_an_unpaired_profile(tmp_path):
    """Gradients are compared with stock's inside, to the bit where nothing is cut."""
    (tmp_path / "timelines").mkdir()
    chosen = ["--cases", "45-m4", "--configurations", "k1", "paired-k1", "paired-mix", "planned"]
    output, result, _ = run_on_network("prediction", tmp_path, *chosen, "--timelines", tmp_path / "timelines")
    assert "with pairing: median" in output
    (case,) = result["cases"]
    profile = from_plain(Profile, case["profile"], "profile")
    assert profile.model.num_micro_batches == 4
    assert all("paired" not in name for name in profile.measured_steps_ms)
    for name in ("paired-k1", "paired-mix"):
        assert from_plain(Plan, case["plans"][name], name).is_paired
        assert [len(ranks) for ranks in case["samples"][name]] == [2, 2]
        assert num_passes(tmp_path / "timelines" / f"45-m4-{name}.json") > 8
    assert num_passes(tmp_path / "timelines" / "45-m4-k1.json") == 8


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.alone
@pytest.mark.usefixtures("shaped_network")
def test_every_dispatch_is_profiled_predicted_and_measured(tmp_path):
    """Gradients are compared with stock's inside. The link is the one that is not shaped."""
    chosen = ["--cases", "unshaped-nodes-top4", "--configurations", "k1", "dedup-k1", "two-hop-k2", "planned"]
    output, result, _ = run_on_network("prediction", tmp_path, *chosen)
    (case,) = result["cases"]
    assert case["rate_bps"] is None
    profile = from_plain(Profile, case["profile"], "profile")
    assert (profile.model.nodes, profile.model.ep_size) == (Nodes(2, 2), 4)
    measured = " ".join(profile.measured_steps_ms)
    assert all(f"dispatch={dispatch}" in measured for dispatch in (DEDUP, TWO_HOP))
    for name, dispatch in (("k1", PLAIN), ("dedup-k1", DEDUP), ("two-hop-k2", TWO_HOP)):
        plan = from_plain(Plan, case["plans"][name], name)
        assert plan.dispatch is dispatch
        assert simulate(profile, plan).prediction.step_ms == pytest.approx(case["predictions"][name]["step_ms"])
        assert [len(ranks) for ranks in case["samples"][name]] == [4, 4]
    planned = from_plain(Plan, case["plans"]["planned"], "planned").dispatch
    assert f"The planner's choice ({planned}) takes" in output


def num_passes(trace: Path) -> int:
    """Pieces of a pass that the first rank computed without any of the other pass between."""
    spans = sorted(read_trace(trace).measured[0].spans, key=lambda span: span.start_ms)
    computed = [span.name.split(".")[-2] for span in spans if span.name.endswith((".attention", ".experts"))]
    return len(list(groupby(computed)))
