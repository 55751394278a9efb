"""The seams of Megatron and torch exist, and a missing one is a message; hooks run in their order."""

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.datasets import utils as dataset_utils
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training import training

from megatron_lancet.errors import UsageError
from megatron_lancet.patching import replaced
from megatron_lancet.runtime import comm_stats
from megatron_lancet.training.megatron import seams, versions
from megatron_lancet.training.megatron.patches import (
    dataset_helpers_of_the_wheel,
    measured_stock_communication,
    train_step_hooks,
    training_loop_hooks,
)
from tests.fakes import cpu_stats


class Clock:
    """The host's clock in the counters, which a message moves by 20 ms."""

    def __init__(self, monkeypatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(comm_stats, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    def wait(self) -> None:
        self.now_s += 0.02


def test_stocks_messages_of_experts_are_timed(monkeypatch):
    """Blocking ones, and the wait of those that run beside shared experts; gradients' messages are not."""
    clock, experts, others = Clock(monkeypatch), object(), object()
    work = SimpleNamespace(wait=clock.wait, is_completed=lambda: False)

    def all_to_all_single(*tensors, group=None, async_op=False):
        return work if async_op else clock.wait()

    monkeypatch.setattr(torch.distributed, "all_to_all_single", all_to_all_single)
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_group", lambda check_initialized=True: experts)
    stats, rows = cpu_stats(), torch.ones(2)
    with measured_stock_communication(stats):
        torch.distributed.all_to_all_single(rows, rows, group=others)
        torch.distributed.all_to_all_single(rows, rows, group=experts)
        blocking = stats.take()
        handle = torch.distributed.all_to_all_single(rows, rows, group=experts, async_op=True)
        assert not handle.is_completed()
        assert stats.take().exposed_ms == 0.0
        handle.wait()
        beside = stats.take()
    assert blocking.num_all_to_alls == 1
    for times in (blocking, beside):
        assert times.exposed_ms == times.all_to_all_ms == pytest.approx(20)


def test_rows_that_ranks_gather_are_no_counts(monkeypatch):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(token_dispatcher, "gather_from_sequence_parallel_region", lambda rows: clock.wait())
    stats = cpu_stats()
    with measured_stock_communication(stats):
        token_dispatcher.gather_from_sequence_parallel_region(torch.ones(2))  # as in a pass that is recomputed later
        assert stats.take().counts_exposed_ms == 0.0
        token_dispatcher.gather_from_sequence_parallel_region(torch.ones(2, dtype=torch.int64))
    assert stats.take().counts_exposed_ms == pytest.approx(20)


def test_installed_megatron_has_all_seams():
    versions.check_versions()
    seams.check_seams()


def test_missing_parameter_of_a_seam_is_named():
    def gating(self, hidden):
        raise NotImplementedError

    with (
        replaced(TopKRouter, "gating", gating),
        pytest.raises(UsageError, match=r"TopKRouter\.gating\(input\)"),
    ):
        seams.check_seams()


@pytest.mark.parametrize(
    ("package", "installed", "known"),
    [
        ("megatron-core", "0.18.1", False),
        ("megatron-core", "0.20.0", False),
        ("megatron-core", "0.19.5", True),
        ("torch", "2.10.0", False),
        ("torch", "2.11.0+cu128", True),
    ],
)
def test_megatron_versions_are_checked(monkeypatch, package, installed, known):
    true_version = importlib.metadata.version
    monkeypatch.setattr(versions, "version", lambda name: installed if name == package else true_version(name))
    if known:
        versions.check_versions()
    else:
        with pytest.raises(UsageError, match=rf"expected {package}.*found {package} {installed}"):
            versions.check_versions()


def test_missing_package_is_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(UsageError, match="megatron-core is not installed"):
        versions.check_versions()


def test_megatron_runs_make_only_where_it_has_a_makefile(monkeypatch, tmp_path):
    """A wheel has none, and make would end the run."""
    stock = dataset_utils.compile_helpers
    with dataset_helpers_of_the_wheel():
        dataset_utils.compile_helpers()
    (tmp_path / "Makefile").touch()
    monkeypatch.setattr(dataset_utils, "__file__", str(tmp_path / "utils.py"))
    with dataset_helpers_of_the_wheel():
        assert dataset_utils.compile_helpers is stock


def test_step_hooks_run_from_the_outermost_to_the_last(monkeypatch):
    calls = []

    def hook(name):
        def observe(step):
            calls.append(f"before {name}")
            result = step()
            calls.append(f"after {name}")
            return [name, *result]

        return observe

    def train_step(*args, **kwargs):
        calls.append(("step", args, kwargs))
        return ["stock"]

    monkeypatch.setattr(training, "train_step", train_step)
    with train_step_hooks([hook("first"), hook("last")]):
        assert training.train_step(1, model=2) == ["first", "last", "stock"]
    assert calls == ["before first", "before last", ("step", (1,), {"model": 2}), "after last", "after first"]
    assert training.train_step is train_step


def loop_calls(monkeypatch, error: BaseException | None, in_a_step: bool = False) -> list[str]:
    """What runs around a training loop that ends with ``error``."""
    calls = []

    def step():
        if in_a_step:
            raise error

    def train(*_):
        calls.append("loop")
        step()
        if error is not None:
            raise error
        return "result"

    monkeypatch.setattr(training, "train", train)
    with training_loop_hooks(before=lambda: calls.append("before"), after=lambda: calls.append("after")):
        if error is None:
            assert training.train("model") == "result"
        else:
            with pytest.raises(type(error)):
                training.train("model")
    return calls


@pytest.mark.parametrize("error", [None, SystemExit(0), SystemExit(3)])
def test_training_loop_hooks_run_also_at_an_exit_condition(monkeypatch, error):
    assert loop_calls(monkeypatch, error) == ["before", "loop", "after"]


@pytest.mark.parametrize("error", [RuntimeError("lost a peer"), SystemExit()])
def test_training_loop_hooks_end_nothing_after_a_failure(monkeypatch, error):
    assert loop_calls(monkeypatch, error) == ["before", "loop"]


def test_training_loop_hooks_end_nothing_after_an_exit_of_a_step(monkeypatch):
    """It may be of this rank alone, and what ends a loop is collective."""
    assert loop_calls(monkeypatch, SystemExit(3), in_a_step=True) == ["before", "loop"]
