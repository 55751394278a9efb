"""Stock modules and Megatron's own overlap: every flag and reason has a row; the step works as Megatron calls it."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from megatron.training.training import stimer

from megatron_lancet.training.megatron import gpt_data
from megatron_lancet.training.plan.flag_mapping import map_overlap_flags
from megatron_lancet.training.plan.select import choose_plan
from megatron_lancet.training.plan.support import OVERLAP_FLAGS, UNSUPPORTED
from tests.parity.stock_overlap.rows import FLAGS, REASONS, REFUSED, ROWS, NoRow
from tests.unit.training.configs import config_with
from tests.unit.training.test_flags_table import RUN, words_for
from tests.unit.training.validated import set_as_validation_does

ABOUT_OVERLAP = re.compile(r"overlap|(delay|defer).*wgrad|wgrad.*(delay|defer)", re.DOTALL)
NEEDS = {
    "--recompute-modules": ["--recompute-granularity", "selective"],
    "--dataloader-inter-document-masking": ["--transformer-impl", "transformer_engine", "--context-parallel-size", "2"],
}
VALUES = {
    "--transformer-impl": ["inference_optimized"],
    "--recompute-modules": ["layernorm"],
    "--hybrid-layer-pattern": ["ME"],
    "--cuda-graph-impl": ["transformer_engine"],
}
"""The refused values of flags with other valid values."""


def test_each_overlap_flag_of_megatrons_parser_has_a_row(parser):
    found = {
        action.option_strings[0]
        for action in parser._actions
        if ABOUT_OVERLAP.search(" ".join([*action.option_strings, action.dest, action.help or ""]).lower())
    }
    assert found == set(FLAGS)


def test_each_reason_for_stock_modules_has_a_row():
    assert {flag for entry in UNSUPPORTED for flag in entry.flags.split()} == set(REASONS)


def test_rows_set_the_flags_that_they_are_named_for(parser):
    runs = {**REFUSED, **ROWS}
    named = [(flag, row) for table in (FLAGS, REASONS) for flag, row in table.items() if not isinstance(row, NoRow)]
    assert {row for _, row in named} <= set(runs)
    assert [(flag, row) for flag, row in named if flag not in runs[row].flags.split()] == []


@pytest.mark.parametrize("flag", REASONS)
def test_reason_leaves_overlap_to_megatron(parser, flag):
    """Each reason alone: no plan, unchanged overlap flags of Megatron, and a line with the reason."""
    words = [flag, *VALUES[flag]] if flag in VALUES else words_for(parser._option_string_actions[flag], flag)
    args = parser.parse_args([*RUN, *NEEDS.get(flag, []), *words, *OVERLAP_FLAGS])
    args.rank, args.world_size = 0, 2
    set_as_validation_does(args)
    before = copy.deepcopy(vars(args))
    assert map_overlap_flags(args, config_with()) is None
    assert vars(args) == before
    # Stock modules also refuse documents split across ranks, so no run could use Megatron's overlap.
    if flag != "--dataloader-inter-document-masking":
        plan, line = choose_plan(args, config_with())
        assert plan is None
        assert line.startswith(f"off: {flag}")
        assert line.endswith("Stock Megatron modules, nothing is overlapped")


class _Schedule(AbstractSchedulePlan):
    """The schedule of Megatron's model for a micro-batch."""

    @staticmethod
    def run(*_, **__):
        raise AssertionError("Megatron runs it, not the step")


class _Model(torch.nn.Module):
    """Megatron's model as its loop passes it to a step, but without DDP, FSDP or Float16Module."""

    vp_stage = None

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple, dict]] = []

    def forward(self, *inputs, **further):
        self.calls.append(("forward", inputs, further))
        return torch.ones(2, 3)

    def build_schedule_plan(self, *inputs, **further):
        self.calls.append(("schedule", inputs, further))
        return _Schedule()


@pytest.fixture
def batch(monkeypatch):
    """A micro-batch of two samples, and Megatron's globals for a step."""
    batch = dict.fromkeys(gpt_data._BATCH_KEYS)
    batch |= {"tokens": torch.zeros(2, 3), "labels": torch.ones(2, 3), "loss_mask": torch.ones(2, 3)}
    timer = SimpleNamespace(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr(gpt_data, "get_timers", lambda: lambda *_, **__: timer)
    monkeypatch.setattr(gpt_data, "_next_batch", lambda *_: batch)
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False, log_straggler=False)
    monkeypatch.setattr(gpt_data, "get_args", lambda: args)
    monkeypatch.setattr(gpt_data, "get_rerun_state_machine", lambda: SimpleNamespace(validate_result=lambda **_: None))
    return batch


def further(data_iterator, model):
    """Reads micro-batches with an input that Megatron's lack."""
    return gpt_data._next_batch(data_iterator, model.vp_stage), {"packed_seq_params": None}


@pytest.mark.parametrize("read", [None, further])
def test_step_returns_megatrons_schedule_with_its_inputs(batch, read):
    """Megatron makes the same call with CUDA graphs and FSDP, which no test machine runs."""
    model = _Model()
    output, _ = gpt_data.forward_step(iter([]), model, read=read)
    schedule, loss_of = gpt_data.forward_step(iter([]), model, return_schedule_plan=True, read=read)
    assert isinstance(output, torch.Tensor)
    assert isinstance(schedule, _Schedule)
    (first, *inputs), (second, *same_inputs) = model.calls
    assert (first, second) == ("forward", "schedule")
    assert inputs == same_inputs
    assert inputs[1].keys() == {"labels", "loss_mask"} | ({"packed_seq_params"} if read else set())
    loss, num_tokens, reported = loss_of(torch.full((2, 3), 0.5))
    assert (loss.item(), num_tokens.item(), reported["lm loss"].tolist()) == (3.0, 6, [3.0, 6.0])


def test_step_is_timed_for_megatrons_detector_of_stragglers(batch, monkeypatch):
    """Megatron divides by the time of the forwards at each log interval."""
    model, log = _Model(), []
    monkeypatch.setattr(gpt_data.get_args(), "log_straggler", True)

    def start() -> None:
        log.append(("read" if stimer.bdata else "run", len(model.calls)))
        stimer.bdata = False

    for name, value in (("start", start), ("stop", lambda: log.append(("stop", len(model.calls)))), ("bdata", False)):
        monkeypatch.setattr(stimer, name, value)
    gpt_data.forward_step(iter([]), model)
    assert log == [("read", 0), ("stop", 0), ("run", 0), ("stop", 1)]
