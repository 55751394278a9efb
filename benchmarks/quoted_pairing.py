"""Tables of pairing: each backward beside the next forward, in steps of several micro-batches."""

from benchmarks.harness.tables import markdown
from benchmarks.network.cases import CHUNKED, VARIANTS
from benchmarks.network.summary import Row
from benchmarks.prediction.cases import PAIRED_CASES
from benchmarks.quoted_cells import NO_RESULT, linked, prediction_tables, quartiles, ratio
from benchmarks.quoted_results import network_with_pairs, rows_of


def pairing() -> str:
    """Speed-up and step over bound of stock, of chunks without pairs and of each variant with pairs."""
    cases = network_with_pairs()
    if not cases:
        return NO_RESULT
    every = [rows_of(summary) for _, summary in cases.values()]
    names = [name for name in VARIANTS if _is_shown(name) and any(name in rows for rows in every)]
    lines = [["case", "stock waits for", "stock", *(f"`{name}`" for name in names), "measured"]]
    for (quoted, summary), rows in zip(cases.values(), every, strict=True):
        start = [f"`{summary.name}`", f"{summary.exposed_share:.1%}", f"({ratio(rows['stock'].over_bound)})"]
        source = f"[{quoted.date}](../benchmarks/results/{quoted.file}){quoted.mark}"
        lines.append([*start, *(_cell(rows.get(name)) for name in names), source])
    return markdown(lines)


def _is_shown(name: str) -> bool:
    plan = VARIANTS[name].plan
    return name == CHUNKED or (plan is not None and plan.is_paired)


def _cell(row: Row | None) -> str:
    return "not run" if row is None else f"{row.speedup.median:.2f} ({ratio(row.over_bound)})"


def pairing_variants() -> str:
    """Every variant of every case with several micro-batches."""
    lines = [["case", "variant", "step", "exposed", "step/bound", "steady/bound", "speed-up (quartiles)"]]
    lines[0] += [f"against `{CHUNKED}`", "CPU", "memory"]
    for case, (quoted, summary) in network_with_pairs().items():
        for row in summary.rows:
            if VARIANTS[row.name].free_link:
                continue
            ratios = [ratio(row.over_bound), ratio(row.steady_over_bound), quartiles(row.speedup)]
            ratios += ["" if row.over_chunked is None else quartiles(row.over_chunked)]
            costs = [f"{row.cpu_ratio:.2f}", f"{row.memory_ratio:.2f}"]
            times = [f"{ms:.0f} ms" for ms in (row.step_ms, row.exposed_ms + row.counts_ms)]
            lines.append([linked(case, quoted), f"`{row.name}`", *times, *ratios, *costs])
    return markdown(lines) if len(lines) > 1 else NO_RESULT


def pairing_prediction() -> str:
    """Errors of predicted steps with several micro-batches, and what the planner chose."""
    return prediction_tables(PAIRED_CASES, lambda errors: errors.paired, "configurations with pairing")
