"""Which steps are traced for causes of waits, and what is said of them."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.feature import RunFacts
from megatron_lancet.lab.causes import watch as cause_watch
from megatron_lancet.lab.causes.attribution import CausePart, StepCauses
from megatron_lancet.lab.causes.feature import CAUSES, CausesFlags
from megatron_lancet.lab.causes.replay import Cause
from megatron_lancet.lab.causes.text import CausesOfStep
from megatron_lancet.lab.causes.watch import CauseWatch
from megatron_lancet.schedule.plan import fixed_plan
from tests.unit.training.configs import config_with


@pytest.fixture
def written(monkeypatch):
    """The scalars that are written."""
    scalars = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar))
    monkeypatch.setattr(cause_watch, "megatrons_writer", lambda: writer)
    return scalars


def watch_of(interval: int, recorder: SimpleNamespace | None = None) -> tuple[CauseWatch, SimpleNamespace]:
    comm = SimpleNamespace(trace=None)
    setup = SimpleNamespace(plan=fixed_plan(2), stages=[SimpleNamespace(decoder=SimpleNamespace(comm=comm))])
    return CauseWatch(setup, recorder, torch.device("cpu"), lambda: True, interval), setup


@pytest.mark.parametrize("is_due", [True, False])
def test_the_step_of_the_report_is_left_to_the_report(monkeypatch, is_due):
    traced = []
    monkeypatch.setattr(cause_watch, "traced_step", lambda *args: traced.append(args) or (None, None))
    monkeypatch.setattr(cause_watch, "traced_rank", lambda *_: None)
    monkeypatch.setattr(cause_watch, "gathered_causes", lambda *_: found(4, 4.0))
    monkeypatch.setattr(cause_watch, "megatrons_writer", lambda: None)
    monkeypatch.setattr(cause_watch, "write_cause_scalars", lambda *_: None)
    setup, recorder = watch_of(1)[1], SimpleNamespace(num_steps=3, iteration=4)
    watch = CauseWatch(setup, recorder, torch.device("cpu"), lambda: True, 1, lambda: is_due)
    watch.observe(lambda: None)
    assert len(traced) == (not is_due)


def found(step: int, rows_ms: float) -> CausesOfStep:
    parts = {str(cause): CausePart(rows_ms if cause is Cause.ROWS else 0.0, 0.0, 3, 1.6) for cause in Cause}
    return CausesOfStep(step, StepCauses(200.0, rows_ms, parts, 0.0, 0.0))


def test_lasting_change_is_said_once_with_its_step(written, capsys):
    watch, _ = watch_of(10)
    for window in range(1, 41):
        watch.note(found(10 * window, 4.0 if window < 20 else 28.0))
    assert capsys.readouterr().out.splitlines() == [
        "Megatron-Lancet causes of step 10: 4.0 of 200.0 ms exposed: uneven rows 4.0",
        "Megatron-Lancet since step 200 rank 3 receives 1.6 times the mean: 14 % of a step, 2 % before",
    ]
    assert ("lancet/exposed_by_cause/rows_ms", 28.0, 400) in written
    assert len(written) == 40 * (len(Cause) + 2)


def test_another_plan_begins_anew(written, capsys):
    watch, setup = watch_of(10)
    for window in range(1, 41):
        setup.plan = fixed_plan(2 if window < 20 else 4)
        watch.note(found(10 * window, 4.0 if window < 20 else 28.0))
    assert "since step" not in capsys.readouterr().out


def test_a_step_without_causes_is_kept_and_writes_nothing(written, capsys):
    watch, _ = watch_of(10)
    watch.note(CausesOfStep(10, why_not="a rank is missing"))
    assert capsys.readouterr().out == "Megatron-Lancet causes of step 10: none, since a rank is missing\n"
    assert written == []
    assert len(watch.found) == 1


def test_one_step_of_an_interval_is_traced(monkeypatch):
    """Not in the warm-up of a plan, and not if another traces it already."""
    recorder = SimpleNamespace(num_steps=0, iteration=0)
    watch, setup = watch_of(3, recorder)
    comm = setup.stages[0].decoder.comm
    traced = []
    monkeypatch.setattr(cause_watch, "traced_step", lambda _setup, _device, step: (step(), recorder.iteration))
    monkeypatch.setattr(cause_watch, "traced_rank", lambda own, _: own)
    monkeypatch.setattr(cause_watch, "gathered_causes", lambda _setup, _device, step, own: traced.append((step, own)))
    monkeypatch.setattr(watch, "note", lambda _: None)
    for recorder.iteration in range(1, 16):
        comm.trace = object() if recorder.iteration == 9 else None
        assert watch.observe(lambda: "result") == "result"
        recorder.num_steps += 1
    assert traced == [(6, 6), (12, 12), (15, 15)]


def test_stock_modules_can_not_be_traced():
    asked = config_with(CausesFlags(diagnose_interval=5))
    with pytest.raises(UsageError, match="--lancet-diagnose-interval 5 traces the overlapping block"):
        CAUSES.check(RunFacts(None, asked, None))
    CAUSES.check(RunFacts(None, asked, fixed_plan(2)))
    CAUSES.check(RunFacts(None, config_with(), None))
