"""Tables and lines about causes of waits."""

import json

import pytest

from megatron_lancet.files import from_plain, to_plain
from megatron_lancet.lab.causes.attribution import CausePart, StepCauses
from megatron_lancet.lab.causes.changes import Change
from megatron_lancet.lab.causes.replay import Cause
from megatron_lancet.lab.causes.text import CausesOfStep, change_line

PARTS = {
    Cause.WIRE: CausePart(40.0, 45.0, None, 312.0),
    Cause.ROWS: CausePart(28.0, 28.0, 3, 1.6),
    Cause.PACE: CausePart(-0.5, 2.0, 1, 1.05),
    Cause.COUNTS: CausePart(1.0, 1.0, None, 3.0),
    Cause.HOST: CausePart(6.0, 6.0, 0, 12.0),
}
FOUND = CausesOfStep(1200, StepCauses(200.0, 80.0, {str(cause): part for cause, part in PARTS.items()}, 2.5, 3.0))


def test_table():
    assert FOUND.as_text() == (
        "exposed time by cause, step 1200, mean over ranks\n"
        "  cause                      ms  of step    alone\n"
        "  wire                    40.00   20.0 %    45.00  a rank sends at 312 Mbit/s\n"
        "  uneven rows             28.00   14.0 %    28.00  rank 3 receives 1.6 times the mean\n"
        "  late or slow rank       -0.50   -0.2 %     2.00\n"
        "  token counts             1.00    0.5 %     1.00\n"
        "  host                     6.00    3.0 %     6.00  rank 0 waits 12 ms of a step for its host\n"
        "  nothing left to run      2.50    1.2 %\n"
        "  unexplained              3.00    1.5 %\n"
        "  all                     80.00   40.0 %"
    )


def test_line_names_what_matters_the_longest_first():
    assert FOUND.as_line() == (
        "causes of step 1200: 80.0 of 200.0 ms exposed: wire 40.0, uneven rows 28.0, host 6.0, unexplained 3.0, "
        "nothing left to run 2.5"
    )


def test_a_step_without_causes_says_why():
    found = CausesOfStep(7, why_not="not all ranks have it")
    assert found.as_text() == "exposed time by cause: none, since not all ranks have it"
    assert found.as_line() == "causes of step 7: none, since not all ranks have it"


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (Cause.ROWS, "since step 1,200 rank 3 receives 1.6 times the mean: 14 % of a step, 2 % before"),
        (
            Cause.PACE,
            "since step 1,200 rank 1 is late or slow, 1.05 times the mean: 14 % of a step, 2 % before",
        ),
        (Cause.WIRE, "since step 1,200 a rank sends at 312 Mbit/s: 14 % of a step, 2 % before"),
        (Cause.COUNTS, "since step 1,200 exchanges of token counts take 3.0 ms of a step: 14 % of a step, 2 % before"),
        (Cause.HOST, "since step 1,200 rank 0 waits 12 ms of a step for its host: 14 % of a step, 2 % before"),
    ],
)
def test_line_of_a_change_says_who_and_what(cause, expected):
    assert change_line(Change(1200, cause, 0.02, 0.14, PARTS[cause])) == expected


def test_line_of_a_change_for_the_better_names_the_cause():
    line = change_line(Change(1200, Cause.ROWS, 0.14, 0.02, PARTS[Cause.ROWS]))
    assert line == "since step 1,200 less is waited for because of uneven rows: 2 % of a step, 14 % before"


def test_what_a_report_holds_is_read_again():
    plain = json.loads(json.dumps(to_plain(FOUND)))
    assert from_plain(CausesOfStep, plain, "report.json") == FOUND
