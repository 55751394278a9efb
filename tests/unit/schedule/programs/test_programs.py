"""The programs of plans are the frozen ones, which parse back into the same instructions."""

import pytest

from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.schedule.ops import Phase
from megatron_lancet.schedule.turns import AddResidual, Instruction
from tests.unit.schedule.programs.cases import CASES
from tests.unit.schedule.programs.frozen import (
    FOLDER,
    REPEAT,
    difference,
    forward_of,
    instructions_of,
    programs_in,
    programs_of,
    text_of,
)

MAX_LINES = 4000
"""Of all files together: more is not read in a review."""


@pytest.mark.parametrize("name", CASES)
def test_programs_equal_the_frozen_text(name):
    frozen = (FOLDER / f"{name}.txt").read_text()
    made = programs_of(CASES[name])
    if changed := difference(name, frozen, text_of(CASES[name], made)):
        pytest.fail(f"{changed}\nIf the order is meant to change: {REPEAT}", pytrace=False)
    assert programs_in(frozen) == made


def test_every_plan_has_a_file_and_every_file_a_plan():
    files = list(FOLDER.glob("*.txt"))
    assert {file.stem for file in files} == set(CASES)
    assert sum(len(file.read_text().splitlines()) for file in files) < MAX_LINES


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_frozen_forward_is_the_simulated_one(case):
    """Which has no steps of cuts inside layers, and none of residuals: an op's time has its residual's."""
    for plan in (case.plan.in_middle, case.plan.at_ends):
        for stage in Simulator(CostModel(case.profile)).stages(plan):
            forward = [one for one in forward_of(case, plan.segments, stage.number) if isinstance(one, Instruction)]
            in_steps = [one for one in forward if not isinstance(one.verb, AddResidual)]
            assert instructions_of(stage.forward, Phase.FORWARD) == in_steps


def test_swapped_instructions_are_shown_as_changed_lines():
    text = "[forward]\nwait L1.c0.F.dispatch\nL1.c0.F.experts\n"
    shown = difference("name", text, "[forward]\nL1.c0.F.experts\nwait L1.c0.F.dispatch\n").splitlines()
    assert shown[:2] == ["--- name, frozen", "+++ name, now"]
    assert [line[1:] for line in shown[3:] if line[0] == "-"] == [line[1:] for line in shown[3:] if line[0] == "+"]
    assert len([line for line in shown[3:] if line[0] in "-+"]) == 2
    assert difference("name", text, text) == ""
