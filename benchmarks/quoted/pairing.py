"""Tables of pairing: each backward overlaps the next forward, in steps of several micro-batches."""

from benchmarks.harness.tables import markdown
from benchmarks.network.cases import CHUNKED, PAIRED_CASES, VARIANTS
from benchmarks.prediction.cases import PAIRED_CASES as PREDICTED_CASES
from benchmarks.quoted.cells import NO_RESULT, NOT_RUN, PASSES, linked, prediction_tables, quartiles, ratio
from benchmarks.quoted.network import Measured, dates, measured, network_with_pairs, with_sources


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


def pairing_variants() -> str:
    """Returns all variants of all cases with several micro-batches."""
    lines = [["case", "variant", PASSES, "exposed", "step/bound", "steady/bound", "speed-up (quartiles)"]]
    lines[0] += [f"against `{CHUNKED}`", "CPU", "memory"]
    for case, (quoted, summary) in network_with_pairs().items():
        for row in summary.rows:
            if VARIANTS[row.name].free_link:
                continue
            ratios = [ratio(row.over_bound), ratio(row.steady_over_bound), quartiles(row.speedup)]
            ratios += ["" if row.over_chunked is None else quartiles(row.over_chunked)]
            costs = [f"{row.cpu_ratio:.2f}", f"{row.memory_ratio:.2f}"]
            times = [f"{ms:.0f} ms" for ms in (row.step_ms, row.exposed_ms + row.counts_ms)]
            lines.append([linked(case, quoted), _heading(row.name), *times, *ratios, *costs])
    return markdown(lines) if len(lines) > 1 else NO_RESULT


def pairing_prediction() -> str:
    """Returns errors of predicted steps with several micro-batches, and the planner's choices."""
    return prediction_tables(PREDICTED_CASES, lambda errors: errors.paired, "configurations with pairing")
