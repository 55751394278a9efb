"""Tables and lines about causes of waits."""

import json
from dataclasses import replace

import pytest

from megatron_lancet.files.reader import from_plain
from megatron_lancet.files.records import to_plain
from megatron_lancet.lab.causes.attribution import CausePart, StepCauses
from megatron_lancet.lab.causes.changes import Change
from megatron_lancet.lab.causes.replay import Cause
from megatron_lancet.lab.causes.text import CausesOfStep, change_line, shown_parts

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
        "exposed time by cause, traced step 1200, mean over ranks\n"
        "  cause                      ms     part    alone\n"
        "  wire                    39.75   49.7 %    45.00  a rank sends at 312 Mbit/s\n"
        "  uneven rows             27.83   34.8 %    28.00  rank 3 receives 1.6 times the mean\n"
        "  late or slow rank        0.00    0.0 %     2.00\n"
        "  token counts             0.99    1.2 %     1.00\n"
        "  host                     5.96    7.5 %     6.00  rank 0 waits 12 ms of a step for its host\n"
        "  nothing left to run      2.48    3.1 %\n"
        "  unexplained              2.98    3.7 %\n"
        "  all                     80.00  100.0 %\n"
        "  parts below 0, where waits would grow without the cause, are shown as 0; the others are scaled to the sum"
    )


def test_shown_parts_are_not_negative_and_sum_to_the_waits():
    shown = shown_parts(FOUND.causes)
    assert shown["pace"] == 0 == min(shown.values())
    assert sum(shown.values()) == pytest.approx(80)
    assert FOUND.causes.by_name()["pace"] == -0.5  # what report.json has


def test_table_without_negative_parts_is_as_measured():
    parts = {**FOUND.causes.parts, "pace": CausePart(0.0, 0.0, 1, 1.05)}
    found = replace(FOUND, causes=replace(FOUND.causes, parts=parts, exposed_ms=80.5))
    assert "  wire                    40.00 " in found.as_text()
    assert found.as_text().endswith("  all                     80.50  100.0 %")


def test_line_names_what_matters_the_longest_first():
    assert FOUND.as_line() == (
        "causes of step 1200: 80.0 of 200.0 ms exposed: wire 39.8, uneven rows 27.8, host 6.0, unexplained 3.0, "
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
