"""Automatic tuning in the real loop: whatever it switches to, and back from, losses are stock Megatron's."""

import json
import re
from pathlib import Path

import pytest

from megatron_lancet.lab.views.trace_file import read_trace
from megatron_lancet.planning.plan_file import read_plan_file
from megatron_lancet.planning.profile import read_profile
from megatron_lancet.schedule.layers import LayerKind
from tests.ranks import launch
from tests.ranks.pretraining import EP2, Run, command_line, pretrain

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("tuning_worker.py")
NUM_ITERS, SAVED_AT = 120, 118
"""A profile and a race of six plans, and then of the attention kernel, take at most 100 steps if the race is short."""
NUM_SCRIPTED_ITERS = 61
TUNED = ["--lancet-tune-steps", "3"]
NONE = "chunks=1 dim=batch range=stack"
TWO, FOUR, SEQUENCE = NONE.replace("1", "2"), NONE.replace("1", "4"), "chunks=2 dim=sequence range=stack"
# As in test_losses_equal_stock.py: the order of sums.
TOLERANCE = 1e-5


def tuned(token_data, folder: Path, script: dict, *extra: object) -> tuple[Run, list[str], list[str]]:
    """A run, the first segment of the plan at each step, and the lines about plans."""
    result = folder / "result.json"
    env = {"LANCET_TEST_RESULT": str(result), "LANCET_TEST_TUNING": json.dumps(script)}
    # As many steps are planned as in stock's run, so that both read the same samples.
    planned = ["--train-iters", NUM_ITERS, "--exit-interval", NUM_SCRIPTED_ITERS]
    command = command_line(token_data, [*EP2, *TUNED, *planned, *extra])
    ranks = launch.run(WORKER, command, 2, folder, timeout_s=120, env=env)
    launch.check(ranks)
    found = json.loads(result.read_text())
    outputs = [rank.output for rank in ranks]
    run = Run(found["losses"], found["model_modules"], [], outputs)
    return run, found["plans"], lines_of(run)


def lines_of(run: Run) -> list[str]:
    return re.findall(r"^Megatron-Lancet plan: (.*)$", "\n".join(run.outputs), re.MULTILINE)


@pytest.fixture(scope="module")
def stock(tmp_path_factory, token_data) -> Run:
    extra = [*EP2, "--lancet-plan", "off"]
    return pretrain(token_data, extra, tmp_path_factory.mktemp("stock"), train_iters=NUM_ITERS)


def assert_equal(run: Run, stock: Run, first: int = 0) -> None:
    assert run.losses
    for name in ("lm loss", "grad norm"):
        expected = stock.series(name)[first : first + len(run.losses)]
        assert run.series(name) == pytest.approx(expected, rel=TOLERANCE), name


def test_tuning_writes_files_and_saves_the_plan(stock, token_data, tmp_path):
    """Nothing scripted: whatever plan is found, it is in the files and in the checkpoint, and losses are stock's."""
    shared = [*EP2, "--lancet-tune-steps", "1", "--lancet-cache", tmp_path / "cache"]
    saving = ["--save", tmp_path / "checkpoints", "--save-interval", SAVED_AT]
    report = ["--lancet-report", tmp_path]
    extra = [*shared, *saving, *report]
    run = pretrain(token_data, extra, tmp_path / "first", train_iters=NUM_ITERS, LANCET_TEST_SHORT_RACE="1")
    assert len(run.losses) == NUM_ITERS
    assert_equal(run, stock)
    said = lines_of(run)
    assert any("weight gradients deferred by up to two all-to-alls, fused attention: " in line for line in said), said
    # A noisy profile can make the plan without overlap a finalist. Its text then has a prediction too.
    racers = r"measuring \d plans in turns: (?=.*, predicted )no overlap[^;]*; no overlap, fused attention\b.*"
    expected = re.compile(rf"{racers}\(best of \d+, planned in .* from a profile of \d+ steps")
    assert any(expected.search(line) for line in said), said
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["tuning"]["stage"] == "watch"
    assert str(read_plan_file(tmp_path / "plan.json").plan) == found["plan"]
    assert read_profile(tmp_path / "profile.json").measured_steps_ms
    timelines = read_trace(tmp_path / "trace.json")
    assert [timeline.rank for timeline in timelines.measured] == [0, 1]
    assert [timeline.rank for timeline in timelines.before] == [0, 1]
    assert timelines.predicted
    assert found["exposed"]["before_ms"] is not None
    assert (tmp_path / "timeline.html").exists()
    assert (tmp_path / "run.html").exists()
    assert f"Megatron-Lancet report: {found['verdict']}" in run.outputs[0]
    assert " on this machine " in found["verdict"]
    assert found["tuning"]["pay_off"] in run.outputs[0]
    assert found["tflops_per_s"] > 0
    assert found["peak_memory_bytes"] > 10**8
    assert sum(point["num_steps"] for point in found["steps"]) == NUM_ITERS

    load = ["--load", tmp_path / "checkpoints", "--ckpt-step", SAVED_AT]
    resumed = pretrain(token_data, [*shared, *load], tmp_path / "second", train_iters=NUM_ITERS)
    assert_equal(resumed, stock, first=SAVED_AT)
    assert f"({found['plan']}), from the checkpoint: " in lines_of(resumed)[1]
    assert "  tuning             taken from the checkpoint\n" in resumed.outputs[0]
    assert f" to {NUM_ITERS}\n" in resumed.outputs[0].partition("medians over steps ")[2], "as in Megatron's log"

    off = pretrain(token_data, [*EP2, "--lancet-plan", "off", *load], tmp_path / "third", train_iters=NUM_ITERS)
    assert_equal(off, stock, first=SAVED_AT)

    again = pretrain(token_data, shared, tmp_path / "fourth", train_iters=60)
    (profile,) = (tmp_path / "cache").iterdir()
    # Used, or said to fit no longer: other work on this machine may have slowed the steps down.
    assert any(f"the profile {profile}" in line for line in lines_of(again)), lines_of(again)


@pytest.mark.nightly
def test_tuning_plans_multi_token_predictions_too(token_data, tmp_path):
    both = [*EP2, "--mtp-num-layers", "2", "--mtp-use-repeated-layer", "--position-embedding-type", "rope"]
    expected = pretrain(token_data, [*both, "--lancet-plan", "off"], tmp_path / "stock", train_iters=80)
    report = ["--lancet-tune-steps", "1", "--lancet-report", tmp_path]
    run = pretrain(token_data, [*both, *report], tmp_path / "tuned", train_iters=80)
    assert_equal(run, expected)
    profile, made_for = read_profile(tmp_path / "profile.json"), read_plan_file(tmp_path / "plan.json").made_for
    assert list(profile.model.mtp_layers) == [3, 4]
    assert made_for is not None
    assert (made_for.num_layers, made_for.num_mtp_layers) == (4, 2)
    assert {op.kind for op in profile.ops if op.layer_kind is LayerKind.MTP} == {"mtp_projection"}
    assert {grad.name for grad in profile.weight_grads if grad.layer_kind is LayerKind.MTP} == {"eh_proj"}


@pytest.mark.alone
def test_race_drops_slow_plans_and_replans_after_drift(stock, token_data, tmp_path):
    slow_s = {"4": 0.6, "2": 0.5, "2s": 0.5, "fused": 0.5}
    script = {"profiled": ["none", "none", "2", "4s"], "plans": [["4", "2"], ["2s"]], "slow_s": slow_s}
    script["exposed_from"] = 28
    run, plans, lines = tuned(token_data, tmp_path, script, "--lancet-report", tmp_path)
    kernel, in_profile = f"{NONE} fused", [NONE, NONE, TWO, SEQUENCE.replace("2", "4")]
    first, second = [NONE, kernel, FOUR, TWO], [NONE, kernel, SEQUENCE]
    races = [
        [plan for plan in racers for _ in range(3)] + racers[-1:] + [plan for plan in racers[-2::-1] for _ in range(2)]
        for racers in (first, second)
    ]
    expected = [
        *[NONE] * 3, *in_profile, *races[0],  # warm-up, profile, race
        *[NONE] * 11, *in_profile, *races[1],  # three windows, and all again
    ]  # fmt: skip
    assert plans[: len(expected)] == expected
    assert len(run.losses) == NUM_SCRIPTED_ITERS
    assert_equal(run, stock)
    kinds = (
        "tuned during training", "tunes during the first steps, about 36 and more", "no overlap: ",
        "measuring 4 plans in turns: no overlap; fused; chunks=4 .* predicted 50.0 ms",
        "out after 2 turns: fused .*, chunks=4 .*, chunks=2 .* no overlap takes",
        "no overlap: measured .* and no plan is faster .* the attention kernel alone gave 0",
        "exposed time is .* planning anew", "measuring 3 plans in turns: .* chunks=2 dim=sequence",
    )  # fmt: skip
    for kind, line in zip(kinds, lines[: len(kinds)], strict=True):
        assert re.search(kind, line), lines
    tuning = json.loads((tmp_path / "report.json").read_text())["tuning"]
    assert (tuning["stage"], tuning["num_plans"], tuning["lines"]) == ("watch", 2, lines[1:])


def test_auto_plans_for_pipeline_stages(token_data, tmp_path):
    stages = ["--pipeline-model-parallel-size", 2, "--num-layers", 4, "--disable-bias-linear", "--overlap-grad-reduce"]
    run = pretrain(token_data, [*EP2, *TUNED, *stages], tmp_path, 4, train_iters=60)
    (line,) = [line for line in lines_of(run) if "measuring" in line]
    # A noisy profile can favour plans that overlap nothing: these are the same on all stages.
    predicted = r"(layers 3-end: .*|(no overlap|dw=none)[^;]*), predicted "
    assert re.search(r"measuring \d plans in turns: no overlap\b.*\(best of \d+", line)
    assert re.search(predicted, line), line
