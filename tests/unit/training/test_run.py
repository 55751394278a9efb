"""The end of a run: its closing report."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lancet.features.cuda_graphs import feature as cuda_graphs
from megatron_lancet.schedule.plan import fixed_plan
from megatron_lancet.training import job
from megatron_lancet.training.observe import traced_steps
from megatron_lancet.training.run import OverlappedRun


def ended(stages: tuple[object, ...]) -> Any:
    """A run of which only the parts exist that Megatron has made before the model."""
    run: Any = OverlappedRun.__new__(OverlappedRun)
    run.setup, run.steering = SimpleNamespace(stages=stages), SimpleNamespace(writes_only=False)
    return run


def test_run_that_ends_before_its_model_has_no_report():
    """Megatron's own message is the last one, and no error of the report hides it."""
    ended(()).report()
    with pytest.raises(AttributeError, match="config"):  # a report needs the whole run
        ended((object(),)).report()


def test_conversion_of_a_checkpoint_ends_with_status_0(monkeypatch):
    """Megatron ends it with exit(), as it ends some failures."""

    def convert(*_: object, **__: object) -> None:
        raise SystemExit

    args = SimpleNamespace(ckpt_convert_format="torch_dist", ckpt_convert_save="to", save="to/torch_dist")
    monkeypatch.setattr(job, "pretrain", convert)
    monkeypatch.setattr(job, "get_args", lambda: args)
    assert job._train(None, convert, convert, convert) == 0
    for args.ckpt_convert_format, args.save in (("torch_dist", None), (None, "to/torch_dist")):
        with pytest.raises(SystemExit, match="ended this rank without a status"):
            job._train(None, convert, convert, convert)


@pytest.fixture
def steps(monkeypatch):
    """A function that runs a step of a run that traces one, and captures graphs; and a log."""
    log: list[str] = []

    def traced_step(setup: Any, device: Any, step: Any) -> tuple[Any, str]:
        log.append("trace")
        return step(), "trace"

    comm, run = SimpleNamespace(trace=None), ended(())
    run.setup.plan, run.setup.stages = fixed_plan(1), [SimpleNamespace(decoder=SimpleNamespace(comm=comm))]
    run.setup.check_step = lambda step: step()
    run.steering.observe = lambda step: step()
    run.recorder = SimpleNamespace(num_steps=0, iteration=0, observe=lambda step: step(), features=[])
    monkeypatch.setattr(traced_steps, "traced_step", traced_step)
    monkeypatch.setattr(cuda_graphs, "StageGraphs", lambda _: SimpleNamespace(is_installed=True, begin_step=list))
    graphs = cuda_graphs.ActiveGraphs(run.setup, lambda: True, 5)
    monkeypatch.setattr(graphs, "_capture", lambda: log.append("capture"))
    run._features = run.recorder.features = [graphs]
    run.traced = traced_steps.TracedSteps(run.setup, run.recorder, None, lambda: True)

    def run_step() -> None:
        step = lambda: log.append("step")  # noqa: E731
        for hook in reversed(run._step_hooks()):
            step = partial(hook, step)
        step()
        run.recorder.num_steps += 1

    return run_step, log


def test_traced_step_begins_behind_the_capture_of_graphs(steps):
    """Earlier steps run eagerly, also behind the warm-up of a run."""
    run_step, log = steps
    for _ in range(7):
        run_step()
    assert log == [*5 * ["step"], "capture", "trace", "step", "step"]
