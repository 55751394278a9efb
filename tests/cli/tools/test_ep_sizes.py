"""Steps and plans of other expert-parallel sizes, and reductions of gradients: the tools end to end."""

import dataclasses
import json

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.errors import UsageError
from megatron_lancet.planning.plan_file import read_plan_file
from tests.cli.loading import load_tool

FEW_PLANS = ["--chunk-dim", "batch", "--range", "stack", "--dw-policy", "none"]
NETWORK = ["--intra-gbps", "0.1", "--intra-latency-us", "0"]


@pytest.fixture
def run(capsys):
    def run(name, *argv):
        load_tool(f"plans/{name}").main([str(word) for word in [*argv, *FEW_PLANS]])
        return capsys.readouterr().out

    return run


@pytest.fixture
def profile(tmp_path):
    found = synthetic_profile(Machine("dm", shares=(0.25,) * 4, chunk_counts=(1, 2), num_micro_batches=64))
    link = dataclasses.replace(found.link, all_reduce=((0, 0.0), (1_000_000, 5.0)))
    path = tmp_path / "profile.json"
    path.write_text(dataclasses.replace(found, link=link).to_json())
    return path


def test_table_compares_ep_sizes(run, profile, tmp_path):
    """Many micro-batches send rows often and gradients once; few of them the other way round."""

    def steps(*argv):
        path = tmp_path / "table.json"
        text = run("simulate_plan", profile, *NETWORK, "--ep-size", 4, 2, 1, "--output", path, *argv)
        rows = json.loads(path.read_text())["rows"]
        assert [line.split()[2] for line in text.splitlines()[1:]] == [str(row["ep_size"]) for row in rows]
        return {(row["world_size"], row["ep_size"]): row["variants"]["planned"]["step_ms"] for row in rows}

    often, once = steps(), steps("--num-micro-batches", 1)
    assert list(often) == list(once) == [(4, 4), (4, 2), (4, 1)]
    assert min(often, key=often.__getitem__) == (4, 1)
    assert min(once, key=once.__getitem__) == (4, 4)
    assert list(steps("--world-sizes", 8, 4)) == [(4, 4), (4, 2), (4, 1), (8, 4), (8, 2), (8, 1)]


def test_plan_of_another_ep_size_is_written(run, profile, tmp_path):
    plan = tmp_path / "plan.json"
    run("make_plan", profile, "--output", plan, "--ep-size", 2, *NETWORK)
    assert read_plan_file(plan).made_for.ep_size == 2
    run("make_plan", profile, "--output", plan, "--overlap-grad-reduce", "--bucket-mb", "2")
    assert read_plan_file(plan).made_for.ep_size == 4
    shown = run("simulate_plan", profile, plan, "--overlap-grad-reduce", "--bucket-mb", "2", "--spans")
    assert "reduce.dense.b0" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ep-size", "4", "3"], "EP size 3 does not divide the"),
        (["--comm-priority", "off"], "pass --overlap-grad-reduce too"),
        (["--use-distributed-optimizer"], "pass --overlap-grad-reduce too"),
        (["--overlap-grad-reduce", "--bucket-mb", "9", "--comm-priority", "all-to-all-first",
          "--grad-chunk-mb", "1e-5"], "into more than 10000"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_with_one_message(run, profile, flags, message):
    with pytest.raises(UsageError, match=message):
        run("simulate_plan", profile, *flags)


@pytest.mark.parametrize("flags", [["--spans"], ["--picture", "x.png"], ["--lengths", "x.json"]])
def test_table_over_ep_sizes_refuses_flags_of_one_layout(run, profile, flags, capsys):
    with pytest.raises(SystemExit):
        run("simulate_plan", profile, "--ep-size", 4, 2, *flags)
    assert "--ep-size" in capsys.readouterr().err


def test_reductions_of_one_data_parallel_rank_are_refused(run, profile):
    found = json.loads(profile.read_text())
    profile.write_text(json.dumps({**found, "model": {**found["model"], "world_size": 1, "ep_size": 1},
                                   "received_share": [1.0]}))  # fmt: skip
    with pytest.raises(UsageError, match="one data-parallel rank"):
        run("simulate_plan", profile, "--overlap-grad-reduce")


def test_a_single_rank_gets_no_plan(profile, capsys):
    with pytest.raises(SystemExit):
        load_tool("plans/make_plan").main([str(profile), "--output", "plan.json", "--ep-size", "1"])
    assert "a run needs no plan" in capsys.readouterr().err
