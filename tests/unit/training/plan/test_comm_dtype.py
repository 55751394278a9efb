"""Which runs may narrow their messages, and what they are told."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.features.comm_dtype.feature import CommDtypeFlags, choose_comm_dtype, comm_dtype_note
from megatron_lancet.schedule.comm_dtype import CommDtype, RowFormat
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.plan import fixed_plan
from megatron_lancet.training.plan.support import overlap_blockers
from tests.unit.training.configs import config_with

PLAN = fixed_plan(2)


def arguments(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**{"expert_model_parallel_size": 2, "params_dtype": torch.float32, **changes})


@pytest.mark.parametrize(
    ("op", "in_fp8_run"),
    [
        ("L1.c0.F.dispatch", RowFormat.FP8),
        ("L1.c0.F.combine", RowFormat.BF16),
        ("L1.c0.I.combine", RowFormat.BF16),
        ("L1.c0.I.dispatch", RowFormat.BF16),
    ],
)
def test_only_forward_dispatches_are_in_fp8(op, in_fp8_run):
    assert CommDtype.FP8.row_format(Op.parse(op)) is in_fp8_run
    assert CommDtype.EXACT.row_format(Op.parse(op)) is RowFormat.EXACT


def test_messages_are_exact_unless_the_user_asks():
    for args in (arguments(), arguments(expert_model_parallel_size=1)):
        assert choose_comm_dtype(args, config_with(), None) is CommDtype.EXACT
    assert comm_dtype_note(CommDtype.EXACT) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_narrower_format_is_taken_and_said(dtype):
    assert (
        choose_comm_dtype(arguments(params_dtype=dtype), config_with(CommDtypeFlags(CommDtype.FP8)), PLAN)
        is CommDtype.FP8
    )
    assert comm_dtype_note(CommDtype.FP8).startswith("; comm_dtype=fp8: hidden states are rounded in messages")


@pytest.mark.parametrize(
    ("changes", "plan", "message"),
    [
        ({"expert_model_parallel_size": 1}, PLAN, r"--expert-model-parallel-size is 1 and none are sent"),
        ({"expert_model_parallel_size": 1}, None, r"--lancet-comm-dtype fp8 narrows .* none are sent"),
        ({}, None, r"stock Megatron modules, whose all-to-alls stay .* Drop it, or --lancet-plan off"),
    ],
)
def test_a_format_that_would_change_nothing_is_refused(changes, plan, message):
    with pytest.raises(UsageError, match=message):
        choose_comm_dtype(arguments(**changes), config_with(CommDtypeFlags(CommDtype.FP8)), plan)


def test_a_narrow_format_asks_for_the_overlap(monkeypatch):
    """A run that can't overlap is refused, and does not fall back to stock modules."""
    monkeypatch.setattr(
        "megatron_lancet.training.plan.support.unsupported", lambda args, validated: [("--some-flag", "drop it")]
    )
    assert overlap_blockers(arguments(), config_with()) != []
    assert overlap_blockers(arguments(), config_with(CommDtypeFlags(CommDtype.FP8))) == []
