"""Steps on CUDA are timed with events, which are read when the next step has been launched."""

from types import SimpleNamespace

import pytest
import torch
from megatron.training import global_vars

from megatron_lancet.runtime.comm_stats import CommStats, EventPair
from megatron_lancet.runtime.transport.nccl import _StreamTransfer
from megatron_lancet.training.observe import step_recorder
from megatron_lancet.training.observe.step_recorder import StepRecorder
from tests.fake_events import FakeDevice

NUM_ALL_TO_ALLS = 100


class Run:
    """A run on CUDA; step n computes for n ms during its messages, the last of which is exposed for another ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, interval: int = 1) -> None:
        monkeypatch.setattr(step_recorder, "get_num_microbatches", lambda: 2)
        monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", self)
        self.device = FakeDevice(monkeypatch)
        self.stats = CommStats(torch.device("cuda"))
        sizes = {"micro_batch_size": 4, "data_parallel_size": 2, "seq_length": 128}
        self.args = SimpleNamespace(**sizes, curr_iteration=0, tensorboard_log_interval=interval)
        self.recorder = StepRecorder(self.args, torch.device("cuda"), self.stats)
        self.scalars: list[tuple[float, int]] = []

    def step(self) -> None:
        number = self.args.curr_iteration + 1
        self.recorder.observe(lambda: self._launch(number))
        self.args.curr_iteration = number

    def message(self, exposed_ms: float) -> None:
        times = EventPair()
        self.device.now_ms += exposed_ms
        times.end.record()
        self.device.now_ms -= exposed_ms
        _StreamTransfer(times, (), self.stats).wait()
        self.device.now_ms += exposed_ms

    def _launch(self, number: int) -> None:
        self.device.log.append(f"step {number}")
        self.device.now_ms += number
        for _ in range(NUM_ALL_TO_ALLS - 1):
            self.message(0.0)
        self.message(1.0)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if tag == "lancet/step_ms":
            self.scalars.append((value, step))


@pytest.fixture
def run(monkeypatch):
    return Run(monkeypatch)


def figures(records) -> list[tuple[float, float]]:
    return [(record.step_ms, record.comm.exposed_ms) for record in records]


def test_step_recorder_waits_for_step_when_next_is_launched(run):
    for _ in range(4):
        run.step()
    assert run.device.log == ["step 1", "step 2", "wait", "step 3", "wait", "step 4", "wait"]
    assert figures(run.recorder.records) == [(2.0, 1.0), (3.0, 1.0), (4.0, 1.0), (5.0, 1.0)]
    assert run.device.log[-1:] == ["wait"]
    assert run.device.counts["synchronize"] == 4
    assert run.recorder.records  # read once
    assert run.device.counts["synchronize"] == 4


def test_step_recorder_asks_two_times_of_each_message(run):
    for _ in range(3):
        run.step()
    before = dict(run.device.counts)
    run.step()
    added = {what: number - before[what] for what, number in run.device.counts.items()}
    assert added == {
        "record": 3 * NUM_ALL_TO_ALLS + 2,
        "wait": NUM_ALL_TO_ALLS,
        "elapsed": 2 * NUM_ALL_TO_ALLS + 1,
        "synchronize": 1,
    }


def test_step_recorder_counts_a_step_before_its_figures_are_read(run):
    run.step()
    assert (run.recorder.num_done, run.recorder.num_steps) == (1, 1)
    run.recorder.restart()  # the plan changes; the step before was under the old one
    assert run.recorder.num_steps == 0
    run.step()
    assert (run.recorder.num_done, run.recorder.num_steps) == (2, 1)
    assert figures(run.recorder.records[-1:]) == [(3.0, 1.0)]
    assert run.device.log == ["step 1", "step 2", "wait", "wait"]


def test_step_recorder_drops_messages_between_steps(run):
    run.step()
    run.message(50.0)
    run.step()
    assert figures(run.recorder.records) == [(2.0, 1.0), (3.0, 1.0)]


def test_step_recorder_writes_scalars_of_the_step_that_it_reads(monkeypatch):
    run = Run(monkeypatch, interval=2)
    for _ in range(4):
        run.step()
    assert run.scalars == [(3.0, 2)]
    assert run.recorder.records  # as the report does
    assert run.scalars == [(3.0, 2), (5.0, 4)]


@pytest.mark.parametrize(("dispatcher", "is_timed"), [("alltoall", True), ("allgather", False), ("flex", False)])
def test_report_of_stock_has_only_times_that_were_taken(run, monkeypatch, capsys, dispatcher, is_timed):
    one_rank = SimpleNamespace(
        get_world_size=lambda: 1, get_rank=lambda: 0, all_gather_object=lambda found, own: found.__setitem__(0, own)
    )
    facts = dict.fromkeys(("model", "num_ranks", "device", "unit", "date"), "")
    monkeypatch.setattr(step_recorder, "dist", one_rank)
    monkeypatch.setattr(step_recorder, "megatrons_writer", lambda: None)
    monkeypatch.setattr(step_recorder, "peak_memory_bytes", lambda _: 1)
    monkeypatch.setattr(step_recorder, "run_facts", lambda *_: facts)
    monkeypatch.setattr(step_recorder, "rates", lambda *_: {})
    vars(run.args).update(expert_model_parallel_size=2, moe_token_dispatcher_type=dispatcher)
    run.step()
    report = run.recorder.report(None, None)
    times = {"all_to_all_ms", "exposed_ms", "counts_exposed_ms"}
    assert [times <= one.keys() for one in (report, *report["ranks"])] == [is_timed] * 2
    assert is_timed or times.isdisjoint(report)
    assert ["exposed_ms" in one for one in report["steps"]] == [is_timed]
    text = capsys.readouterr().out
    assert ("not timed with this dispatcher; pass --moe-token-dispatcher-type alltoall" in text) is not is_timed
    assert ("% of the step" in text) is is_timed
