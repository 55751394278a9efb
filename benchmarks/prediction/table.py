"""The errors as text for a terminal and as markdown."""

from collections.abc import Sequence

from benchmarks.harness.samples import ends_of
from benchmarks.harness.tables import aligned, markdown
from benchmarks.prediction.errors import (
    MAX_ERROR,
    MAX_EXPOSED_ERROR,
    MAX_EXPOSED_MS,
    MAX_MEDIAN_ERROR,
    MAX_SLOWER,
    CaseErrors,
    Comparison,
    totals,
)

_HEADINGS = (
    "configuration",
    "measured ms (quartiles)",
    "predicted",
    "error",
    "exposed ms",
    "predicted",
    "difference",
)


def _cells(one: Comparison) -> list[str]:
    return [
        one.name,
        f"{one.measured_ms:.0f} ({one.low_ms:.0f}-{one.high_ms:.0f})",
        f"{one.predicted_ms:.0f}",
        f"{one.error:+.1%}",
        f"{one.measured_exposed_ms:.1f}",
        f"{one.predicted_exposed_ms:.1f}",
        f"{one.exposed_error_ms:+.1f}{'' if one.exposed_is_close else ' !'}",
    ]


def _description(case: CaseErrors) -> str:
    share = "" if case.measured_share is None else f", k1 exposes {case.measured_share:.1%} of its step"
    disturbed = (
        " DISTURBED: other work took the processor or memory; quote these figures only with this mark."
        if case.is_disturbed
        else ""
    )
    choice = ""
    if case.planned_over_fastest is not None:
        choice = (
            f" The planner's choice ({case.planned_dispatch}) takes {case.planned_over_fastest - 1:.1%} longer than "
            f"the fastest, {case.fastest} (wanted: at most {MAX_SLOWER:.0%})."
        )
    rate = "no cap" if case.rate_bps is None else f"{case.rate_bps / 1e6:.0f} Mbit/s"
    return f"{case.title}: {rate}{share}; {case.num_repeats} repeats.{choice}{disturbed}"


def _conclusion(cases: Sequence[CaseErrors]) -> str:
    total = totals([one for case in cases for one in case.comparisons])
    text = (
        f"{total.number} configurations: error of the step time median {total.median:.1%} (wanted: at most "
        f"{MAX_MEDIAN_ERROR:.0%}), worst {total.worst:.1%} in {total.worst_name} (at most {MAX_ERROR:.0%}); exposed "
        f"time within {MAX_EXPOSED_ERROR:.0%} or {MAX_EXPOSED_MS:.0f} ms in {total.num_exposed_close} of {total.number}"
    )
    for what, some in {
        "pairing": [one for case in cases for one in case.paired],
        "tiles": [one for case in cases for one in case.tiled],
    }.items():
        if some:
            own = totals(some)
            text += (
                f". The {own.number} with {what}: median {own.median:.1%}, worst {own.worst:.1%} in {own.worst_name}"
            )
    halves = [one for case in cases for one in case.halves]
    if halves:
        own = totals(halves)
        text += (
            f". For comparison, the first half of the repeats as a prediction of the second: {own.median:.1%}, "
            f"{own.worst:.1%}, {own.num_exposed_close} of {own.number}"
        )
    return text


def _lines(case: CaseErrors) -> list[list[str]]:
    headings = (heading.replace("quartiles", ends_of(case.num_repeats)) for heading in _HEADINGS)
    return [list(headings), *(_cells(one) for one in case.comparisons)]


def as_text(cases: Sequence[CaseErrors]) -> str:
    """Aligned columns."""
    blocks = [f"{case.name}: {_description(case)}\n{aligned(_lines(case))}" for case in cases]
    return "\n\n".join([*blocks, _conclusion(cases)])


def as_markdown(cases: Sequence[CaseErrors]) -> str:
    """The conclusion, then a heading, a paragraph and a table for each case."""
    blocks = [f"### {case.name}\n\n{_description(case)}\n\n{markdown(_lines(case))}" for case in cases]
    return "\n\n".join([_conclusion(cases), *blocks]) + "\n"
