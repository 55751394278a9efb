"""The packing tool and the planner's option from end to end, and what they refuse."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.errors import UsageError
from megatron_lancet.planning.plan_file import read_plan_file

TOOLS = Path(__file__).resolve().parents[3] / "tools"
FEW_PLANS = ["--chunk-dim", "batch", "--range", "stack", "--dw-policy", "none"]
NETWORK = ["--intra-gbps", "0.1", "--intra-latency-us", "0"]


def load(name):
    spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(capsys):
    def run(name, *argv):
        load(name).main([str(word) for word in [*argv, *FEW_PLANS]])
        return capsys.readouterr().out

    return run


@pytest.fixture
def profile(tmp_path):
    found = synthetic_profile(Machine("dm", shares=(0.25,) * 4, chunk_counts=(1, 2), num_micro_batches=64))
    link = dataclasses.replace(found.link, all_reduce=((0, 0.0), (1_000_000, 5.0)))
    path = tmp_path / "profile.json"
    path.write_text(dataclasses.replace(found, link=link).to_json())
    return path


def test_pack_experts_table_says_what_to_change(run, profile, tmp_path):
    output = tmp_path / "sizes.json"
    text = run("pack_experts", profile, *NETWORK, "--output", output)
    assert text == run("pack_experts", profile, *NETWORK)
    sizes = json.loads(output.read_text())
    assert [one["ep_size"] for one in sizes["sizes"]] == [4, 2, 1]
    assert sizes["fastest_ep_size"] == 1
    assert "to apply: restart from a checkpoint with --expert-model-parallel-size 1 --lancet-experts-apart" in text
    assert json.loads(run("pack_experts", profile, *NETWORK, "--format", "json")) == sizes
    limited = run("pack_experts", profile, *NETWORK, "--memory-mb", "50")
    assert "too large" in limited
    assert "--expert-model-parallel-size 2" in limited
    beside = run("pack_experts", profile, *NETWORK, "--overlap-grad-reduce", "--comm-priority", "all-to-all-first")
    assert "drop --lancet-comm-priority" in beside


def test_pack_experts_writes_a_plan_for_another_size(run, profile, tmp_path):
    plan = tmp_path / "plan.json"
    said = run("make_plan", profile, "--output", plan, "--ep-size", "auto", *NETWORK)
    assert "expert-parallel size 2: run with --expert-model-parallel-size 2" in said
    assert "EP 1 is predicted faster" in said
    assert read_plan_file(plan).made_for.ep_size == 2
    run("make_plan", profile, "--output", plan, "--overlap-grad-reduce", "--bucket-mb", "2")
    assert read_plan_file(plan).made_for.ep_size == 4
    shown = run("simulate_plan", profile, plan, "--overlap-grad-reduce", "--bucket-mb", "2", "--spans")
    assert "reduce.dense.b0" in shown


@pytest.mark.parametrize(
    ("tool", "flags", "message"),
    [
        ("pack_experts", ["--memory-mb", "1"], "no expert-parallel size fits into 1 MB"),
        ("pack_experts", ["--world-size", "3", "--comm-priority", "off"], "pass --overlap-grad-reduce too"),
        ("simulate_plan", ["--use-distributed-optimizer"], "pass --overlap-grad-reduce too"),
        ("pack_experts", ["--overlap-grad-reduce", "--bucket-mb", "9", "--comm-priority", "all-to-all-first",
                          "--grad-chunk-mb", "1e-5"], "into more than 10000"),
    ],
)  # fmt: skip
def test_pack_experts_refuses_wrong_input_with_one_message(run, profile, tool, flags, message):
    with pytest.raises(UsageError, match=message):
        run(tool, profile, *flags)


def test_pack_experts_refuses_reductions_of_one_data_parallel_rank(run, profile):
    found = json.loads(profile.read_text())
    profile.write_text(json.dumps({**found, "model": {**found["model"], "world_size": 1, "ep_size": 1},
                                   "received_share": [1.0]}))  # fmt: skip
    with pytest.raises(UsageError, match="one data-parallel rank"):
        run("pack_experts", profile, "--overlap-grad-reduce")


def test_pack_experts_makes_no_plan_for_a_single_rank(profile, capsys):
    with pytest.raises(SystemExit):
        load("make_plan").main([str(profile), "--output", "plan.json", "--ep-size", "1"])
    assert "a run needs no plan" in capsys.readouterr().err
