"""Scalars go to the writer that Megatron set up, at its steps."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.training import global_vars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from megatron_lancet.report.summary import StepRecord
from megatron_lancet.runtime.comm_stats import CommStats, CommTimes
from megatron_lancet.training.observe import step_recorder
from megatron_lancet.training.observe.scalars import megatrons_writer, write_scalars
from megatron_lancet.training.observe.step_recorder import StepRecorder

COMM = CommTimes(40.0, 10.0, 2.0, 8, 1 << 20, num_dw_in_gaps=7, num_dw_early=1, num_dw_late=2, peak_dw_bytes=9_000_000)
RECORD = StepRecord(200.0, 4096, COMM)
FIGURES = {
    "lancet/step_ms": 200.0,
    "lancet/tokens_per_s": 20480.0,
    "lancet/exposed_share": 0.06,
    "lancet/all_to_all_ms": 40.0,
    "lancet/exposed_ms": 10.0,
    "lancet/counts_exposed_ms": 2.0,
    "lancet/num_dw_in_gaps": 7,
    "lancet/num_dw_early": 1,
    "lancet/num_dw_late": 2,
    "lancet/peak_dw_bytes": 9_000_000,
}


class RecordingWriter:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, scalar_value, global_step):
        self.scalars.append((tag, scalar_value, global_step))


def test_scalars_are_written_at_their_step():
    writer = RecordingWriter()
    write_scalars(writer, 12, RECORD)
    assert writer.scalars == [(name, value, 12) for name, value in FIGURES.items()]
    write_scalars(None, 12, RECORD)  # a rank without a writer


def test_scalars_lack_figures_that_a_rank_does_not_have():
    """Tokens where another rank draws the documents, and messages of a dispatcher that is not timed."""
    writer = RecordingWriter()
    write_scalars(writer, 12, StepRecord(200.0, 0, COMM))
    assert [name for name, _, _ in writer.scalars] == [name for name in FIGURES if name != "lancet/tokens_per_s"]
    writer.scalars.clear()
    write_scalars(writer, 12, replace(RECORD, comm=replace(COMM, all_to_all_ms=0.0)))
    dws = [name for name in FIGURES if "dw" in name]
    assert [name for name, _, _ in writer.scalars] == ["lancet/step_ms", "lancet/tokens_per_s", *dws]


class FakeWandb:
    """The module as Megatron's writer: ``run`` is None when it is finished."""

    def __init__(self):
        self.run, self.logged = "a run", []

    def log(self, values, step):
        self.logged += [(name, value, step) for name, value in values.items()]


def test_wandb_gets_the_same_tags_until_it_is_finished(monkeypatch):
    tensorboard, wandb = RecordingWriter(), FakeWandb()
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", tensorboard)
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", wandb)
    write_scalars(megatrons_writer(), 12, RECORD)
    assert wandb.logged == tensorboard.scalars == [(name, value, 12) for name, value in FIGURES.items()]
    wandb.run = None
    write_scalars(megatrons_writer(), 13, RECORD)
    assert len(wandb.logged) == len(FIGURES)
    assert len(tensorboard.scalars) == 2 * len(FIGURES)
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", None)
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", None)
    assert megatrons_writer() is None


def recorder_of(monkeypatch, args: SimpleNamespace) -> StepRecorder:
    monkeypatch.setattr(step_recorder, "get_num_microbatches", lambda: 2)
    vars(args).update(micro_batch_size=4, data_parallel_size=2, seq_length=128, curr_iteration=0, lancet_tune_steps=10)
    device = torch.device("cpu")
    return StepRecorder(args, device, CommStats(device))


@pytest.mark.parametrize(("interval", "iterations"), [(1, [1, 2, 3, 4]), (2, [2, 4])])
def test_scalar_recorder_writes_to_megatrons_writer(monkeypatch, interval, iterations):
    writer = RecordingWriter()
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", writer)
    args = SimpleNamespace(tensorboard_log_interval=interval)
    recorder = recorder_of(monkeypatch, args)
    for args.curr_iteration in range(4):
        assert recorder.observe(lambda: "result") == "result"
    written = [(value, step) for name, value, step in writer.scalars if name == "lancet/step_ms"]
    assert written == [(recorder.records[step - 1].step_ms, step) for step in iterations]


def test_scalar_recorder_drops_old_steps(monkeypatch):
    """A run may have millions of steps."""
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", None)
    monkeypatch.setattr(step_recorder, "_MIN_KEPT", 20)
    recorder = recorder_of(monkeypatch, SimpleNamespace(tensorboard_log_interval=1))
    for _ in range(30):
        recorder.observe(lambda: None)
    recorder.restart()
    for step in range(31, 100):
        recorder.observe(lambda: None)
        assert recorder.num_done == step
        assert recorder.num_steps == min(step - 30, len(recorder.records))
        assert len(recorder.records) <= 40
    assert recorder.num_steps == len(recorder.records) >= 20


def test_scalars_are_in_a_real_event_file(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        write_scalars(writer, 12, RECORD)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {name: events.Scalars(name)[0].value for name in FIGURES} == pytest.approx(FIGURES)
