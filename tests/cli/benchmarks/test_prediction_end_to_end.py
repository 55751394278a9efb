"""The prediction benchmark on a real, small network: it profiles, predicts, runs, and writes all of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lancet.files import from_plain
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.simulator import simulate
from megatron_lancet.report.timeline.trace_file import read_trace
from megatron_lancet.schedule.plan import Plan

REPO = Path(__file__).parents[3]
TINY = ["--layers", "1", "--hidden", "64", "--seq-length", "32", "--repeats", "2", "--rate", "100"]
CONFIGURATIONS = ["k1", "experts-k4-dw", "sequence-k2-dw", "planned"]


@pytest.mark.distributed
@pytest.mark.alone
@pytest.mark.usefixtures("shaped_network")
def test_a_small_run_predicts_from_its_own_profile_and_measures_the_same_plans(tmp_path):
    (tmp_path / "timelines").mkdir()
    chosen = ["--cases", "skewed", "--configurations", *CONFIGURATIONS, "--timelines", str(tmp_path / "timelines")]
    command = [sys.executable, "-m", "benchmarks.prediction", *TINY, *chosen, "--output", str(tmp_path / "run")]
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=150)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "4 configurations: error of the step time" in output
    result = json.loads((tmp_path / "run.json").read_text())
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
    assert "| experts-k4-dw |" in (tmp_path / "run.md").read_text()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"lancet-{process.pid}-" not in listed
