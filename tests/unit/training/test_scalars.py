"""Scalars go to the writer that Megatron set up, at its steps; the real TensorBoard is used if there is one."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from megatron.training import global_vars

from megatron_lancet.report.summary import StepRecord
from megatron_lancet.runtime.comm_stats import CommStats, CommTimes
from megatron_lancet.training import step_recorder
from megatron_lancet.training.scalars import write_scalars
from megatron_lancet.training.step_recorder import StepRecorder

COMM = CommTimes(40.0, 10.0, 2.0, 8, 1 << 20, num_dw_hidden=7, num_dw_early=1, num_dw_late=2, peak_dw_bytes=9_000_000)
RECORD = StepRecord(200.0, 4096, COMM)
FIGURES = {
    "lancet/step_ms": 200.0,
    "lancet/tokens_per_s": 20480.0,
    "lancet/all_to_all_ms": 40.0,
    "lancet/exposed_ms": 10.0,
    "lancet/counts_exposed_ms": 2.0,
    "lancet/num_dw_hidden": 7,
    "lancet/num_dw_early": 1,
    "lancet/num_dw_late": 2,
    "lancet/peak_dw_bytes": 9_000_000,
}


class RecordingWriter:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, scalar_value, global_step):
        self.scalars.append((tag, scalar_value, global_step))


def test_every_figure_is_written_at_its_step():
    writer = RecordingWriter()
    write_scalars(writer, 12, RECORD)
    assert writer.scalars == [(name, value, 12) for name, value in FIGURES.items()]
    write_scalars(None, 12, RECORD)  # a rank without a writer


@pytest.mark.parametrize(("interval", "iterations"), [(1, [1, 2, 3, 4]), (2, [2, 4])])
def test_the_recorder_writes_where_megatron_does(monkeypatch, interval, iterations):
    writer = RecordingWriter()
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", writer)
    monkeypatch.setattr(step_recorder, "get_num_microbatches", lambda: 2)
    args = SimpleNamespace(
        micro_batch_size=4, data_parallel_size=2, seq_length=128, curr_iteration=0, tensorboard_log_interval=interval
    )
    device = torch.device("cpu")
    recorder = StepRecorder(args, device, CommStats(device))
    for args.curr_iteration in range(4):
        assert recorder.observe(lambda: "result") == "result"
    written = [(value, step) for name, value, step in writer.scalars if name == "lancet/step_ms"]
    assert written == [(recorder.records[step - 1].step_ms, step) for step in iterations]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="no tensorboard: pip install tensorboard")
def test_a_real_event_file_holds_them(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        write_scalars(writer, 12, RECORD)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {name: events.Scalars(name)[0].value for name in FIGURES} == pytest.approx(FIGURES)
