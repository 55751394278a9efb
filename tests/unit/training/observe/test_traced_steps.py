"""Steps that are traced for the report, and their numbers."""

from types import SimpleNamespace
from typing import Any

from megatron_lancet.schedule.plan import fixed_plan, plan_without_overlap
from megatron_lancet.training.observe import traced_steps
from megatron_lancet.training.observe.run_report import report_overlap


def test_step_without_overlap_has_its_number(monkeypatch):
    """It is the measured one in the report of a run that ends before its final plan."""
    monkeypatch.setattr(traced_steps, "traced_step", lambda _setup, _device, step: (step(), object()))
    comm = SimpleNamespace(trace=None)
    setup: Any = SimpleNamespace(
        plan=plan_without_overlap(), stages=[SimpleNamespace(decoder=SimpleNamespace(comm=comm))]
    )
    recorder: Any = SimpleNamespace(num_steps=0, iteration=41, features=[])
    is_settled = False
    traced = traced_steps.TracedSteps(setup, recorder, None, lambda: is_settled)

    def run_steps(number: int) -> None:
        for _ in range(number):
            traced.observe(lambda: None)
            recorder.num_steps += 1
            recorder.iteration += 1

    run_steps(5)
    assert (traced.last, traced.iteration) == (None, 41 + traced_steps.NUM_WARM_UP_STEPS - 1)
    is_settled, setup.plan = True, fixed_plan(2)
    run_steps(5)
    assert (traced.plan, traced.iteration) == (setup.plan, 41 + 5)


def test_missing_timeline_is_explained_by_the_plan(monkeypatch, capsys):
    """A run that resumes with a plan may end before it has confirmed it, after any number of steps."""
    setup: Any = SimpleNamespace(plan=fixed_plan(2))
    recorder: Any = SimpleNamespace(num_steps=0, iteration=1, features=[], report=lambda *_: {})
    traced = traced_steps.TracedSteps(setup, recorder, None, lambda: False)
    for recorder.num_steps in range(10):
        traced.observe(lambda: None)
    monkeypatch.setattr(traced, "gather", lambda title: None)
    report_overlap(recorder, setup, None, traced)
    assert "no timeline: a traced step needs a confirmed plan, and 3 steps before it" in capsys.readouterr().out
