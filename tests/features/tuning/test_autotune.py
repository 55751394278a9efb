"""How a run begins, and what it says, without other ranks: a fixed plan, a checkpoint's, or tuning."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_lancet.errors import UsageError
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.tuning import autotune
from megatron_lancet.features.tuning.autotune import AutoTune
from megatron_lancet.features.tuning.controller import (
    Planned,
    PlanningFailed,
    TuningController,
    TuningState,
)
from megatron_lancet.features.tuning.race import Candidate
from megatron_lancet.features.tuning.tuned_plan import TunedPlan
from megatron_lancet.files.records import to_plain
from megatron_lancet.plan_words import plan_text
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.report.compared import Compared
from megatron_lancet.report.summary import StepRecord
from megatron_lancet.runtime.comm_stats import CommTimes
from megatron_lancet.schedule.plan import DwPolicy, fixed_plan, paired, plan_without_overlap
from megatron_lancet.training.observe.step_stats import StepStats

SHORT, PLANNED, PROFILED = fixed_plan(2), fixed_plan(3), fixed_plan(4)
PAIRED = paired(fixed_plan(1, DwPolicy.NONE))
MADE_FOR = {"seq_length": "32"}
SAVED = TunedPlan(PROFILED, MADE_FOR, StepStats(90.0, 1.0, 5.0, 1.0, 40.0, 4), StepStats(100.0, 1.0, 9.0, 1.0, 40.0, 4))


def planned(plan):
    return Planned((Candidate(plan, prediction=StepEstimate(80.0, 3.0)),), why="scripted")


class Maker:
    def __init__(self, num_steps: int, failure: str | None = None) -> None:
        self._num_steps = self._left = num_steps
        self._failure = failure
        self.micro_batches = 4
        self.dropped: list[str] = []

    def made_for(self):
        return MADE_FOR if self.micro_batches == 4 else {**MADE_FOR, "num_micro_batches": str(self.micro_batches)}

    def num_steps(self):
        return self._num_steps

    def num_micro_batches(self):
        return self.micro_batches

    def drop(self, reason):
        self.dropped.append(reason)
        self._left = 0

    def begin(self, again):
        assert not again

    def next_plan(self):
        self._left -= 1
        if self._left < 0:
            return None
        return PROFILED if self._left < self._num_steps // 2 else plan_without_overlap()

    def run_step(self, step):
        return step()

    def make(self):
        if self._failure is not None:
            raise PlanningFailed(self._failure)
        return planned(PLANNED)


class Run:
    """A training loop whose steps take what their plan says, and the first one after a switch more."""

    STEP_MS = {plan_without_overlap(): 100.0, PLANNED: 80.0, PROFILED: 90.0, SHORT: 95.0, PAIRED: 70.0}

    def __init__(
        self, train_iters=100, num_profile_steps=4, failure=None, resumed_at=0, saved=None, fp16=False, **ends
    ) -> None:
        ends = {"exit_interval": None, "phase_transition_iterations": None, **ends}
        self.args = SimpleNamespace(train_iters=train_iters, curr_iteration=resumed_at, fp16=fp16, **ends)
        self.result: object = "result"
        self.setup = SimpleNamespace(plan=plan_without_overlap(), switch=self._switch)
        self.recorder = SimpleNamespace(records=[], num_steps=0, restart=self._restart)
        self.plans: list = []
        self.first_ms = 0.0
        self.refused: list = []
        self.maker = Maker(num_profile_steps, failure)
        self.now_s = 0.0
        parts = self.args, TuningController(6), self.setup, self.recorder, self.maker, SHORT
        self.tuner = AutoTune(*parts, device="cpu", clock_s=lambda: self.now_s)
        if saved is not None:
            self.tuner.take_from_checkpoint(SimpleNamespace(lancet_tuned_plan=saved))

    def _restart(self) -> None:
        self.recorder.num_steps = 0

    def _switch(self, plan) -> None:
        assert plan != self.setup.plan or self.refused
        if plan in self.refused:
            raise UsageError("the model lacks it")
        self.setup.plan = plan

    def steps(self, number: int) -> list:
        for _ in range(number):
            assert self.tuner.observe(self._step) == self.result
        return self.plans

    def _step(self) -> object:
        self.plans.append(self.setup.plan)
        step_ms = self.STEP_MS[self.setup.plan] + (0 if self.recorder.num_steps else self.first_ms)
        self.recorder.records.append(StepRecord(step_ms, 64, CommTimes(exposed_ms=5.0)))
        self.recorder.num_steps += 1
        self.args.curr_iteration += 1
        self.now_s += self.STEP_MS[self.setup.plan] / 1e3
        return self.result


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, src: None)
    monkeypatch.setattr(dist, "all_gather", lambda rows, row: rows[0].copy_(row))
    monkeypatch.setattr(dist, "all_gather_object", lambda values, value: values.__setitem__(0, value))


def lines(capsys) -> list[str]:
    return [line.removeprefix("Megatron-Lancet plan: ") for line in capsys.readouterr().out.splitlines()]


# Three steps of warm-up and four of a profile, then two turns of two plans; a turn measures two steps.
TURNS = [plan_without_overlap()] * 4 + [PLANNED] * 6 + [plan_without_overlap()] * 3


def test_autotune_profiles_and_lets_plans_race(capsys):
    run = Run()
    assert run.steps(3 + 4 + 13 + 1) == [plan_without_overlap()] * 5 + [PROFILED] * 2 + TURNS + [PLANNED]
    assert lines(capsys) == run.tuner.summary()["tuning"]["lines"]
    summary = run.tuner.summary()["tuning"]
    assert (summary["stage"], summary["how"], summary["num_plans"]) == ("watch", "scripted", 1)
    assert [summary[name]["step_ms"] for name in ("baseline", "predicted", "chosen")] == [100, 80, 80]
    tuned = TunedPlan.from_json(run.args.lancet_tuned_plan, "args")
    assert (tuned.plan, tuned.made_for, tuned.chosen.step_ms) == (PLANNED, MADE_FOR, 80)


def test_autotune_says_what_it_has_brought():
    run = Run()
    run.steps(3 + 4 + 13)
    summary = run.tuner.summary()["tuning"]
    assert summary["steps"] == [[1, 20]]
    assert summary["compared"] == to_plain(Compared(100, 80, 5, 5, 4))
    assert (summary["overlaps"], summary["has_kernel"]) == (True, False)
    assert run.tuner.speed_up({"tuning": summary}) == (
        "1.25x faster than without overlap on this machine (100 ms -> 80 ms a step, exposed 5 % -> 6 %; measured in "
        "turns, n=4)"
    )
    assert summary["pay_off"] == "tuning cost no time: its steps were no slower than without overlap"
    run.steps(4)
    assert run.tuner.summary()["tuning"]["steps"] == [[1, 20]]


def test_autotune_says_what_won_without_overlap(monkeypatch):
    plain = plan_without_overlap()
    quick = replace(plain, dispatch=DEDUP, fused_attention=True)
    monkeypatch.setattr(Maker, "make", lambda self: planned(quick))
    monkeypatch.setitem(Run.STEP_MS, quick, 50.0)
    run = Run()
    run.steps(3 + 4 + 13)
    summary = run.tuner.summary()["tuning"]
    assert (summary["overlaps"], summary["won_by"]) == (False, "one row per token and rank, fused attention")
    assert run.tuner.speed_up({"tuning": summary}).startswith("2.00x faster on this machine by one row per")
    monkeypatch.setitem(Run.STEP_MS, quick, 150.0)
    slower = Run()
    slower.steps(3 + 4 + 13)
    assert slower.tuner.summary()["tuning"]["won_by"] == ""


def test_autotune_says_why_it_compared_nothing():
    short, resumed = Run(train_iters=47), Run(train_iters=5, saved=SAVED.to_json())
    short.steps(47)
    resumed.steps(5)
    summaries = [run.tuner.summary() for run in (short, resumed)]
    assert [run.tuner.speed_up(summary) for run, summary in zip((short, resumed), summaries, strict=True)] == [
        "no plan was compared with no overlap in this run: tuning fixed, because 47 steps are too few to find one: 48 "
        "are needed",
        "no plan was compared with no overlap in this run: tuning taken from the checkpoint; without overlap a step "
        "took 100 ms",
    ]
    assert [summary["tuning"]["steps"] for summary in summaries] == [[], []]
    assert [summary["tuning"]["pay_off"] for summary in summaries] == [None, None]


def test_autotune_saves_no_plan_before_it_has_decided():
    run = Run()
    run.steps(12)
    assert run.args.lancet_tuned_plan is None
    assert run.tuner.summary()["tuning"]["how"] == "not finished: the run ended during race"


def test_autotune_drops_a_plan_that_the_model_refuses(capsys):
    run = Run()
    run.refused = [PLANNED]
    assert run.steps(3 + 4 + 4 + 2)[-6:] == [plan_without_overlap()] * 6
    assert f"{PLANNED} is out: the model lacks it" in lines(capsys)
    assert run.tuner.summary()["tuning"]["stage"] == "watch"


def test_autotune_switches_all_ranks_after_one_has_refused(monkeypatch):
    """Another rank runs the refused plan by now, and waits for this one to switch back."""
    run = Run()
    switched = []
    run.setup.switch = lambda plan: (switched.append(plan), setattr(run.setup, "plan", plan))
    monkeypatch.setattr(
        autotune, "from_all_ranks", lambda reason: [reason, "not here"] if PLANNED in switched else [None]
    )
    run.steps(3 + 4 + 4 + 1)
    assert switched[-2:] == [PLANNED, plan_without_overlap()]


@pytest.mark.parametrize("num_profile_steps", [4, 5])
def test_autotune_profiles_no_plan_that_the_model_refuses(num_profile_steps):
    run = Run(num_profile_steps=num_profile_steps)
    switched = []
    plain_switch = run.setup.switch
    run.setup.switch = lambda plan: (switched.append(plan), plain_switch(plan))
    run.refused = [PROFILED]
    num_profiled = num_profile_steps - num_profile_steps // 2  # the others would be of the refused plan
    run.steps(3 + num_profiled + 14)
    assert run.maker.dropped == ["the model lacks it"]
    assert switched[:3] == [PROFILED, plan_without_overlap(), PLANNED]
    assert run.tuner.summary()["tuning"]["stage"] == "watch"
    assert run.setup.plan == PLANNED


def test_autotune_measures_anew_when_the_batch_grows():
    run = Run()
    run.steps(3 + 4 + 4)
    run.maker.micro_batches = 8
    run.steps(30)
    assert run.tuner.summary()["tuning"]["stage"] == "watch"
    tuned = TunedPlan.from_json(run.args.lancet_tuned_plan, "args")
    assert tuned.made_for == {**MADE_FOR, "num_micro_batches": "8"}
    assert tuned.prediction is None, "the prediction was of four micro-batches"
    run.maker.micro_batches = 16
    run.steps(20)
    later = TunedPlan.from_json(run.args.lancet_tuned_plan, "args")
    assert later.made_for == tuned.made_for, "its steps were of eight micro-batches"


def test_autotune_does_not_count_skipped_steps_of_fp16():
    """Memory for the optimizer's state is still free before its first step."""
    run = Run(fp16=True)
    run.result = {}, 1, False
    run.steps(20)
    assert run.tuner._controller.state is TuningState.WARM_UP
    run.result = {}, 0, False
    run.steps(3)
    assert run.tuner._controller.state is TuningState.PROFILE
    in_bf16 = Run()
    in_bf16.result = {}, 1, False
    in_bf16.steps(3)
    assert in_bf16.tuner._controller.state is TuningState.PROFILE


@pytest.mark.parametrize(
    ("resumed_at", "end"),
    [
        (0, {"exit_interval": 47}),
        (47, {"exit_interval": 47}),
        (30, {"exit_interval": 50}),
        (60, {"phase_transition_iterations": [30, 107, 500]}),
    ],
)
def test_autotune_of_a_run_that_exits_early_has_a_fixed_plan(resumed_at, end):
    run = Run(train_iters=1000, resumed_at=resumed_at, **end)
    run.steps(1)
    num_left = 20 if resumed_at == 30 else 47
    why = f"fixed, because {num_left} steps are too few to find one: 48 are needed"
    assert run.tuner.summary()["tuning"]["how"] == why
    later = Run(train_iters=1000, resumed_at=resumed_at, exit_interval=1000)
    later.steps(1)
    assert later.tuner._controller.state is TuningState.WARM_UP


@pytest.mark.parametrize("resumed_at", [0, 60])
def test_autotune_of_a_short_run_takes_a_fixed_plan(capsys, resumed_at):
    run = Run(train_iters=resumed_at + 47, resumed_at=resumed_at)
    assert run.steps(47) == [SHORT] * 47
    why = "fixed, because 47 steps are too few to find one: 48 are needed"
    assert lines(capsys) == [f"{plan_text(SHORT)} ({why})"]
    assert run.tuner.summary()["tuning"]["how"] == why
    assert run.args.lancet_tuned_plan is None


def test_autotune_keeps_a_plan_that_only_pairs(capsys, monkeypatch):
    monkeypatch.setattr(Maker, "make", lambda self: planned(PAIRED))
    run = Run()
    assert run.steps(3 + 4 + 13 + 4)[-4:] == [PAIRED] * 4
    assert f"measuring 2 plans in turns: no overlap; {PAIRED}, predicted 80.0 ms a step (scripted)" in lines(capsys)
    resumed = Run(saved=run.args.lancet_tuned_plan)
    assert resumed.steps(3) == [PAIRED] * 3
    assert lines(capsys)[0].startswith(f"{plan_text(PAIRED)}, from the checkpoint")


def test_autotune_survives_a_failing_planner(capsys):
    run = Run(failure="the profile has no all-to-all times")
    run.first_ms = 500.0
    assert run.steps(12)[-3:] == [plan_without_overlap()] * 3
    said = lines(capsys)
    assert said[1] == "no overlap: 100.0 ms a step, 5.0 ms of it exposed", "a plan's first step does not count"
    assert said[-1].startswith("the profile has no all-to-all times; the plan stays chunks=1")
    assert run.tuner.summary()["tuning"]["how"] == "no plan was found: the profile has no all-to-all times"


def test_autotune_runs_the_checkpoints_plan_at_once(capsys):
    run = Run(train_iters=5, saved=SAVED.to_json())
    assert run.steps(9) == [PROFILED] * 9
    assert lines(capsys)[0] == (
        f"{plan_text(PROFILED)}, from the checkpoint: 90.0 ms a step, 5.0 ms of it exposed when it was chosen"
    )
    assert run.tuner.summary()["tuning"]["how"] == "taken from the checkpoint"
    assert run.tuner.summary()["tuning"]["baseline"]["step_ms"] == 100
    assert TunedPlan.from_json(run.args.lancet_tuned_plan, "args").plan == PROFILED


@pytest.mark.parametrize(
    ("saved", "reason"),
    [
        (
            TunedPlan(PROFILED, {"seq_length": "64"}, SAVED.chosen).to_json(),
            "the checkpoint's plan was made for another run: seq_length was 64, is 32: tuning anew",
        ),
        ("{}", "the checkpoint's plan: expected version "),
    ],
)
def test_autotune_ignores_a_checkpoints_plan_for_another_run(capsys, saved, reason):
    run = Run(saved=saved)
    assert run.steps(1) == [plan_without_overlap()]
    first, second = lines(capsys)
    assert first.startswith(reason)
    assert second.startswith("tunes during the first steps, about 48 and more")
    assert run.tuner._controller.state is TuningState.WARM_UP
