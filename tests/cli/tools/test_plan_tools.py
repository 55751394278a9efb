"""The planner's tools from end to end: profile, plan, explanation, simulation, and what they refuse."""

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.errors import UsageError
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.planning.plan_file import PlanFile, made_for, read_plan_file, write_plan_file
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Gap, Plan, Segment, fixed_plan
from tests.cli.loading import REPOSITORY, TOOLS, load_tool
from tests.damage import leaves, replaced
from tests.draws import examples

PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def tools():
    return {name: load_tool(f"plans/{name}") for name in ("make_plan", "explain_plan", "simulate_plan")}


@pytest.fixture
def run(tools, capsys):
    """Runs a tool's main in this process; returns what it printed."""

    def run(name, *argv):
        tools[name].main([str(word) for word in argv])
        return capsys.readouterr().out

    return run


def write_profile(path, layers="dmmm", **machine):
    profile = synthetic_profile(
        Machine(layers, **{"shares": (0.3, 0.2, 0.25, 0.25), "chunk_counts": (1, 2), **machine})
    )
    profile = dataclasses.replace(profile, model=dataclasses.replace(profile.model, num_experts=64))
    path.write_text(profile.to_json())
    return profile


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(path)
    return path


def test_plan_is_made_from_a_profile_and_explained(run, profile, tmp_path):
    plan = tmp_path / "plan.json"
    made = run("make_plan", profile, "--output", plan)
    content = read_plan_file(plan)
    assert str(content.plan) in made
    assert f"{content.prediction.step_ms:.1f} ms predicted" in made
    assert content.prediction.step_ms < content.prediction.no_overlap_step_ms
    assert (content.made_for.num_layers, content.made_for.moe_layers) == (4, "2-4")
    assert content.source.device == "synthetic"

    from_file = run("explain_plan", plan)
    assert "made for: 4 layers (MoE: 2-4)" in from_file
    with_reasons = run("explain_plan", plan, "--profile", profile)
    assert f"step {content.prediction.step_ms:.1f} ms" in with_reasons
    assert "layers 2-4 (moe)" in with_reasons
    assert "is filled with" in with_reasons
    assert "exposed because of:" in with_reasons
    assert "other plans for this profile:" in with_reasons
    assert "\nlayer 3 (moe)" in run("explain_plan", plan, "--profile", profile, "--all-layers")

    simulated = run("simulate_plan", profile, plan)
    assert f"step {content.prediction.step_ms:.1f} ms" in simulated
    assert "rank 0: exposed" in simulated
    assert "rank 2, and 1 more that receive as much" in simulated


def test_make_plan_writes_the_same_file_for_the_same_profile(run, profile, tmp_path):
    for name in ("a.json", "b.json"):
        run("make_plan", profile, "--output", tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_make_plan_keeps_limits(run, profile, tmp_path):
    plan = tmp_path / "plan.json"
    run("make_plan", profile, "--output", plan, "--num-chunks", 2, "--range", "gate", "--chunk-dim", "batch",
        "--dw-policy", "fill", "--dw-memory-mb", 1.5)  # fmt: skip
    found = read_plan_file(plan).plan
    assert {(s.num_chunks, s.chunk_dim, s.range) for s in found.segments} == {(2, "batch", "gate")}
    assert (found.dw_policy, found.dw_memory_bytes) == (DwPolicy.FILL, 1_500_000)
    with pytest.raises(
        UsageError, match=r"no plan fits into --max-memory-mb 1: the smallest one found takes about \d+ MB"
    ):
        run("make_plan", profile, "--output", tmp_path / "none.json", "--max-memory-mb", 1)
    assert not (tmp_path / "none.json").exists()


def test_explain_plan_joins_layers_that_are_alike(run, tmp_path):
    plan = Plan(
        (Segment(1, 2, 1), Segment(3, 40, 2, ChunkDim.SEQUENCE)),
        dw_window=4,
        gaps=tuple(Gap(f"L{layer}.c0.I.combine", (f"L{layer + 1}.W.mlp.experts",) * 2) for layer in range(3, 40)),
    )
    write_plan_file(tmp_path / "plan.json", PlanFile(plan))
    text = run("explain_plan", tmp_path / "plan.json")
    assert "made for: any model with these layers" in text
    assert "layers 1-2: the unchunked micro-batch" in text
    assert "layers 3-39: 2 chunks of positions (dim sequence)" in text
    assert text.count("gap c0.I.combine: mlp.experts[+1] x2") == 1
    assert "layer 40: 2 chunks" in text


def test_simulate_plan_writes_json(run, profile, tmp_path):
    printed = json.loads(run("simulate_plan", profile, "--plan", "two-chunks", "--format", "json"))
    run("simulate_plan", profile, "--plan", "two-chunks", "--output", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == printed
    assert {span["name"] for span in printed["timelines"][0]["spans"]} >= {"L2.c0.F.dispatch", "F.head"}
    spans = run("simulate_plan", profile, "--plan", "no-overlap", "--spans")
    assert "L2.c0.I.combine" in spans


def test_what_if_writes_a_table_and_a_picture_over_cluster_sizes(run, profile, tmp_path):
    flags = ["--world-sizes", 4, 64, 4096, "--ep-size", "grow", "--ranks-per-node", 8, "--intra-gbps", 10,
             "--inter-gbps", 1, "--inter-latency-us", 20]  # fmt: skip
    text = run("simulate_plan", profile, *flags, "--picture", tmp_path / "sizes.png", "--output", tmp_path / "t.json")
    assert [line.split()[:4] for line in text.splitlines()[1:]] == [
        ["4", "1", "4", "1"],
        ["64", "8", "64", "1"],
        ["4096", "512", "64", "1"],
    ]
    assert (tmp_path / "sizes.png").read_bytes().startswith(PNG)
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    for row in rows:
        steps = {name: variant["step_ms"] for name, variant in row["variants"].items()}
        assert set(steps) == {"no overlap", "two chunks", "planned"}
        assert steps["planned"] <= min(steps["no overlap"], steps["two chunks"]) + 1e-6
    markdown = run("simulate_plan", profile, *flags, "--plan", "no-overlap", "--format", "markdown")
    assert markdown.splitlines()[1].startswith("| ---: |")
    assert markdown.splitlines()[2].startswith("| 4 | 1 | 4 | 1 |")


def test_plan_of_another_layout_is_simulated_with_a_note(tools, profile, tmp_path, capsys):
    foreign = dataclasses.replace(made_for(synthetic_profile(Machine("dmmm")).model), num_experts=64)
    write_plan_file(tmp_path / "plan.json", PlanFile(fixed_plan(2), foreign))
    tools["simulate_plan"].main([str(profile), str(tmp_path / "plan.json")])
    printed = capsys.readouterr()
    assert printed.err == "note: ep_size is 2 in the plan file, 4 in the profile\n"
    assert printed.out.startswith("profile: synthetic")


def test_simulate_plan_in_another_layout_splits_segments(run, profile, tmp_path):
    write_plan_file(tmp_path / "plan.json", PlanFile(fixed_plan(2)))
    split = run("simulate_plan", profile, tmp_path / "plan.json", "--pp-size", 2, "--routing", "even")
    assert "layers 1-2: chunks=2 dim=batch range=stack, layers 3-end" in split
    assert "rank 0, and 3 more" in split


def test_dispatch_is_chosen_or_asked_for(run, tmp_path):
    profile, path = tmp_path / "p.json", tmp_path / "plan.json"
    write_profile(profile, topk=4)
    made = run("make_plan", profile, "--output", path)
    assert read_plan_file(path).plan.dispatch is DEDUP
    assert "dispatch=dedup" in made
    explained = run("explain_plan", path, "--profile", profile)
    assert "dispatch: dedup, a token goes once to each rank that holds any of its experts\n" in explained
    other = re.search(
        r"the same plan takes ([\d.]+) ms with plain \(a token goes once to each of its experts\)", explained
    )
    run("make_plan", profile, "--output", path, "--dispatch", "plain")
    assert read_plan_file(path).plan.dispatch is PLAIN
    as_dedup = run("simulate_plan", profile, path, "--dispatch", "dedup")
    assert "dispatch=dedup" in as_dedup
    step_ms = [
        float(re.search(r"step ([\d.]+) ms", text)[1]) for text in (as_dedup, run("simulate_plan", profile, path))
    ]
    assert step_ms[0] < step_ms[1] <= float(other[1])
    assert "dispatch=dedup" in run("simulate_plan", profile, "--plan", "two-chunks", "--dispatch", "dedup")
    table = run("simulate_plan", profile, "--world-sizes", 4, 64, "--ep-size", "grow", "--intra-gbps", 10)
    assert "planned: dispatch" in table.splitlines()[0]
    # With one expert on each of 64 ranks no token goes to a rank twice.
    assert [line.split()[-1] for line in table.splitlines()[1:]] == ["dedup", "plain"]


def test_table_compares_the_dispatches(run, tmp_path):
    profile = tmp_path / "p.json"
    write_profile(profile, topk=4)
    network = ["--ranks-per-node", 2, "--intra-gbps", 100, "--inter-gbps", 0.1]
    table = run("simulate_plan", profile, "--world-sizes", 2, 4, "--ep-size", "grow", *network, "--each-dispatch")
    head, one_node, two_nodes = (re.split(r"  +", line.strip()) for line in table.splitlines())
    assert head[-4:] == ["planned: dispatch", "plain: step ms", "dedup: step ms", "two-hop: step ms"]
    assert (one_node[-4], one_node[-1]) == ("dedup", "-")
    assert two_nodes[-4] == "two-hop"
    plain, dedup, two_hop = map(float, two_nodes[-3:])
    assert two_hop < dedup < plain
    shown = run("simulate_plan", profile, "--plan", "two-chunks", "--dispatch", "two-hop", *network)
    assert "dispatch=two-hop" in shown
    path = tmp_path / "plan.json"
    made = run("make_plan", profile, "--output", path, "--dispatch", "two-hop", *network)
    assert "dispatch=two-hop" in made
    assert read_plan_file(path).plan.dispatch is TWO_HOP


DAMAGED = [
    ("make_plan", ["{profile}", "--output", "{folder}/nowhere/p.json"], "output folder .* does not exist"),
    ("make_plan", ["{missing}", "--output", "{folder}/p.json"], "no usable profile: .*missing.json"),
    ("make_plan", ["{half}", "--output", "{folder}/p.json"], "no usable profile: .*half.json"),
    ("make_plan", ["{profile}", "--output", "{folder}/p.json", "--num-chunks", "99"], "the limits leave no plan"),
    ("make_plan", ["{profile}", "--output", "{folder}/p.json", "--dispatch", "dedup"], r"dispatch=dedup: .* \(top-1\)"),
    (
        "simulate_plan",
        ["{profile}", "--plan", "two-chunks", "--dispatch", "dedup"],
        "the plan's dispatch is dedup, but",
    ),
    (
        "simulate_plan",
        ["{profile}", "--world-sizes", "4", "--dispatch", "two-hop", "--ranks-per-node", "4", "--intra-gbps", "9"],
        "two-hop is not possible with 4 ranks: an expert-parallel group has 4 ranks, and a node has 4, so nothing",
    ),
    ("explain_plan", ["{missing}"], "no usable plan: .*missing.json: can't be read"),
    ("explain_plan", ["{half}"], "no usable plan: .*half.json: no JSON, or damaged"),
    ("explain_plan", ["{profile}"], "this is a profile; lancet plan make"),
    ("explain_plan", ["{foreign}", "--profile", "{profile}"], "another model .*: num_layers is 2 in the plan file, 4"),
    ("simulate_plan", ["{profile}", "{half}"], "no usable plan: .*half.json"),
    ("simulate_plan", ["{profile}", "{deep}"], "does not fit a model of 4 layers: its last segment is layers 1-40"),
    ("simulate_plan", ["{profile}", "--world-sizes", "6"], "6 ranks are no multiple of EP size 4"),
    ("simulate_plan", ["{profile}", "--pp-size", "9"], "9 pipeline stages are more than the 4 layers"),
    ("simulate_plan", ["{lonely}", "--ep-size", "8"], "pass --intra-gbps"),
]


@pytest.mark.parametrize(("tool", "argv", "message"), DAMAGED, ids=[" ".join(case[1])[:60] for case in DAMAGED])
def test_plan_tools_refuse_bad_input_with_one_message(run, profile, tmp_path, tool, argv, message):
    names = {"profile": profile, "folder": tmp_path}
    names |= {name: tmp_path / f"{name}.json" for name in ("missing", "half", "foreign", "deep", "lonely")}
    names["half"].write_text(profile.read_text()[:-100])
    write_profile(names["lonely"], shares=(1.0,))
    foreign = write_profile(tmp_path / "foreign_profile.json", layers="mm")
    write_plan_file(names["foreign"], PlanFile(fixed_plan(2), made_for(foreign.model)))
    write_plan_file(names["deep"], PlanFile(Plan((Segment(1, 40, 2),), dw_window=4)))
    with pytest.raises(UsageError, match=message):
        run(tool, *(word.format(**names) for word in argv))


def test_alternatives_that_look_faster_have_a_reason(run, profile, tmp_path):
    """The search ranks plans by a simpler prediction; the command prints the full prediction for the best plan."""
    assert "by a simpler prediction" not in run("make_plan", profile, "--output", tmp_path / "plan.json")
    write_profile(profile, shares=(0.2, 0.05, 0.15, 0.1, 0.08, 0.12, 0.14, 0.16))
    made = run("make_plan", profile, "--output", tmp_path / "plan.json")
    step_ms, by_simpler_ms = (float(re.search(part, made)[1]) for part in (r"step: ([\d.]+) ms", r"takes ([\d.]+) ms"))
    listed_ms = [float(ms) for ms in re.findall(r"^ +([\d.]+) ms  ", made, re.MULTILINE)]
    assert by_simpler_ms <= min(listed_ms) < step_ms


@pytest.mark.parametrize(
    "argv",
    [
        ["p.json", "--routing", "zipf"],
        ["p.json", "--routing", "zipf:-1"],
        ["p.json", "--intra-gbps", "0"],
        ["p.json", "--intra-latency-us", "-1"],
        ["p.json", "--ep-size", "many"],
        ["p.json", "plan.json", "--plan", "auto"],
        ["p.json", "--picture", "x.png"],
        ["p.json", "--spans", "--world-sizes", "4"],
    ],
)
def test_plan_tools_end_with_status_2_for_senseless_flags(run, argv, capsys):
    with pytest.raises(SystemExit) as ending:
        run("simulate_plan", *argv)
    assert ending.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_plan_tool_as_a_program_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    command = [sys.executable, str(TOOLS / "plans/make_plan.py"), "missing.json", "--output", str(tmp_path / "p.json")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: no usable profile: missing.json")
    assert len(ended.stderr.splitlines()) == 1


PROFILE = json.loads(synthetic_profile(Machine("dm", chunk_counts=(1, 2))).to_json())


@examples(60)
@given(st.data())
def test_damaged_profile_is_refused_or_gives_finite_times(tools, data):
    """Never a traceback, nor a list of 10**12 things. What is refused, is refused because of the profile."""
    part = data.draw(st.sampled_from(sorted(PROFILE)))
    place = data.draw(st.sampled_from(leaves(PROFILE[part], (part,)) or [(part,)]))
    wild = data.draw(st.sampled_from([{}, [], "x", -7, 0, 3, 10**400, 10**12, True, 0.5, 1e300]))
    sizes = data.draw(st.sampled_from([[], ["--world-sizes", "2", "8"]]))
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(json.dumps(replaced(PROFILE, place, wild)))
        refusal = None
        try:
            with contextlib.redirect_stdout(printed):
                tools["simulate_plan"].main([str(path), "--plan", "two-chunks", "--format", "json", *sizes])
        except UsageError as error:
            refusal = str(error)
    if refusal is None:
        # A value that is possible: it is computed with, and JSON has no infinite numbers.
        json.loads(printed.getvalue(), parse_constant=lambda name: pytest.fail(f"{name} is no time"))
    else:
        assert re.fullmatch(rf"no usable profile: {re.escape(str(path))}.+|.*\b(profile|shares).*", refusal)
        assert printed.getvalue() == ""
