"""What the tables of several documents share: their cells, and errors of predicted steps."""

from collections.abc import Callable, Collection, Sequence

from benchmarks.harness.samples import Spread
from benchmarks.harness.tables import markdown
from benchmarks.prediction.errors import MAX_ERROR, MAX_MEDIAN_ERROR, MAX_SLOWER, CaseErrors, Comparison, totals
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
    """A median and its quartiles."""
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
    lines = [["case", "configuration", "step (quartiles)", "predicted", "error", "exposed", "predicted"]]
    for quoted, errors in cases:
        for one in errors.comparisons:
            step = f"{one.measured_ms:.0f} ms ({one.low_ms:.0f}-{one.high_ms:.0f})"
            exposed = [f"{ms:.0f} ms" for ms in (one.measured_exposed_ms, one.predicted_exposed_ms)]
            predicted = [f"{one.predicted_ms:.0f} ms", f"{one.error:+.1%}"]
            lines.append([linked(one.case, quoted), f"`{one.name}`", step, *predicted, *exposed])
    texts, mark = [markdown(lines)], together(quoted.mark for quoted, _ in cases)
    of_interest = [one for _, errors in cases for one in counted(errors)]
    if of_interest:
        total = totals(of_interest)
        texts.append(
            f"{total.number} {noun}: error of the step time median {total.median:.1%} (target: at most "
            f"{MAX_MEDIAN_ERROR:.0%}), worst {total.worst:.1%} in `{total.worst_name}` (at most {MAX_ERROR:.0%}){mark}."
        )
    choices = [
        f"`{errors.name}` {errors.planned_over_fastest:.2f} (fastest: `{errors.fastest}`)"
        for _, errors in cases
        if errors.planned_over_fastest is not None
    ]
    if choices:
        texts.append(
            f"Step of the planner's choice over the fastest configuration's (target: at most {1 + MAX_SLOWER:.2f}): "
            f"{', '.join(choices)}{mark}."
        )
    return "\n\n".join(texts)
