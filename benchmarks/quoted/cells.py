"""What the tables of several documents share: their cells, and errors of predicted steps."""

from collections.abc import Callable, Collection, Sequence

from benchmarks.harness.samples import Spread
from benchmarks.harness.tables import markdown
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
from benchmarks.provenance import together
from benchmarks.quoted.results import Quoted, predictions

NO_RESULT = "No result is committed yet."
NOT_RUN = "not run"
PASSES = "forward and backward"
"""Heading of the step time in cases without gradient reduction and optimizer."""


def linked(case: str, quoted: Quoted) -> str:
    """A case's name, as a link to its result in a document of this folder."""
    return f"[`{case}`](results/{quoted.file}){quoted.mark}"


def ratio(value: float | None) -> str:
    """With two digits; nothing where there is none."""
    return "" if value is None else f"{value:.2f}"


def quartiles(found: Spread) -> str:
    """A median and its quartiles, or the range of few values."""
    return f"{found.median:.2f} ({found.low:.2f}-{found.high:.2f})"


def prediction_tables(names: Collection[str], counted: Callable[[CaseErrors], Sequence[Comparison]], noun: str) -> str:
    """Errors of predicted steps, and what the planner chose.

    Args:
        names: of the cases.
        counted: configurations of a case over which the errors are summed up.
        noun: what these are.
    """
    cases = predictions(names)
    if not cases:
        return NO_RESULT
    lines = [["case", "configurations", "error of the step time: median", "worst"]]
    lines[0] += [f"exposed time within {MAX_EXPOSED_ERROR:.0%} or {MAX_EXPOSED_MS:.0f} ms"]
    lines[0] += ["the planner's choice over the fastest"]
    for quoted, errors in cases:
        found = counted(errors)
        if not found:
            continue
        total = totals(found)
        choice = errors.planned_over_fastest
        lines.append(
            [
                linked(errors.name, quoted),
                str(total.number),
                f"{total.median:.1%}",
                f"{total.worst:.1%} (`{total.worst_name.partition(' ')[2]}`)",
                f"{total.num_exposed_close} of {total.number}",
                "" if choice is None else f"{choice:.2f} (fastest: `{errors.fastest}`)",
            ]
        )
    if len(lines) == 1:
        return NO_RESULT
    every, mark = [one for _, errors in cases for one in counted(errors)], together(quoted.mark for quoted, _ in cases)
    total = totals(every)
    return (
        f"{markdown(lines)}\n\n{total.number} {noun}: error of the step time median {total.median:.1%} "
        f"(target: at most {MAX_MEDIAN_ERROR:.0%}), worst {total.worst:.1%} in `{total.worst_name}` "
        f"(at most {MAX_ERROR:.0%}){mark}. "
        f"Target for the planner's choice: at most {1 + MAX_SLOWER:.2f}."
    )
