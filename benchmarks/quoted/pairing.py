"""Tables of pairing: each backward overlaps the next forward, in steps of several micro-batches."""

from benchmarks.network.cases import CHUNKED, PAIRED_CASES, VARIANTS
from benchmarks.prediction.cases import PAIRED_CASES as PREDICTED_CASES
from benchmarks.quoted.cells import NO_RESULT, NOT_RUN, PASSES, prediction_tables, ratio
from benchmarks.quoted.network import Measured, dates, measured, with_sources


def pairing() -> str:
    """Returns speed-up, step over bound and memory of Megatron's overlap, and of our chunks with and without pairs."""
    cases = measured(PAIRED_CASES)
    if not cases:
        return NO_RESULT
    names = [name for name in VARIANTS if _is_shown(name) and any(case.rows(name) for case in cases.values())]
    lines = [[f"case, {PASSES}", "stock waits for", "stock", *map(_heading, names), "measured"]]
    for name, case in cases.items():
        stock = case.row("stock")
        assert stock is not None
        start = [f"`{name}`", f"{case.runs[0].summary.exposed_share:.1%}", f"(bound {ratio(stock.over_bound)})"]
        lines.append([*start, *(_cell(case, one) for one in names), dates(case)])
    return with_sources(lines, cases.values())


def _heading(name: str) -> str:
    return f"`{name}`{', emulated' if VARIANTS[name].overlaps_micro_batches else ''}"


def _is_shown(name: str) -> bool:
    return name == CHUNKED or VARIANTS[name].pairs_micro_batches


def _cell(case: Measured, name: str) -> str:
    row = case.row(name)
    return (
        NOT_RUN if row is None else case.cell(name, f"bound {ratio(row.over_bound)}, memory {ratio(row.memory_ratio)}")
    )


def pairing_prediction() -> str:
    """Returns errors of predicted steps with several micro-batches, and the planner's choices."""
    return prediction_tables(PREDICTED_CASES, lambda errors: errors.paired, "configurations with pairing")
