"""Tables of pairing: each backward beside the next forward, in steps of several micro-batches."""

from benchmarks.harness.samples import Spread
from benchmarks.harness.tables import markdown
from benchmarks.network.cases import UNPAIRED, VARIANTS
from benchmarks.network.summary import Row
from benchmarks.prediction.errors import MAX_ERROR, MAX_MEDIAN_ERROR, MAX_SLOWER, totals
from benchmarks.quoted_results import Quoted, network_with_pairs, predictions, rows_of

_NO_RESULT = "No result is committed yet."


def pairing() -> str:
    """Speed-up and step over bound of stock, of chunks without pairs and of each variant with pairs."""
    cases = network_with_pairs()
    if not cases:
        return _NO_RESULT
    every = [rows_of(summary) for _, summary in cases.values()]
    names = [name for name in VARIANTS if _is_shown(name) and any(name in rows for rows in every)]
    lines = [["case", "stock waits for", "stock", *(f"`{name}`" for name in names), "measured"]]
    for (quoted, summary), rows in zip(cases.values(), every, strict=True):
        start = [f"`{summary.name}`", f"{summary.exposed_share:.1%}", f"({_ratio(rows['stock'].over_bound)})"]
        source = f"[{quoted.date}](../benchmarks/results/{quoted.file}){quoted.mark}"
        lines.append([*start, *(_cell(rows.get(name)) for name in names), source])
    return markdown(lines)


def _is_shown(name: str) -> bool:
    plan = VARIANTS[name].plan
    return name == UNPAIRED or (plan is not None and plan.is_paired)


def _cell(row: Row | None) -> str:
    return "not run" if row is None else f"{row.speedup.median:.2f} ({_ratio(row.over_bound)})"


def pairing_variants() -> str:
    """Every variant of every case with several micro-batches."""
    lines = [["case", "variant", "step", "exposed", "step/bound", "steady/bound", "speed-up (quartiles)"]]
    lines[0] += [f"against `{UNPAIRED}`", "CPU", "memory"]
    for case, (quoted, summary) in network_with_pairs().items():
        for row in summary.rows:
            if VARIANTS[row.name].free_link:
                continue
            ratios = [_ratio(row.over_bound), _ratio(row.steady_over_bound), _spread(row.speedup)]
            ratios += ["" if row.over_unpaired is None else _spread(row.over_unpaired)]
            costs = [f"{row.cpu_ratio:.2f}", f"{row.memory_ratio:.2f}"]
            times = [f"{ms:.0f} ms" for ms in (row.step_ms, row.exposed_ms + row.counts_ms)]
            lines.append([_linked(case, quoted), f"`{row.name}`", *times, *ratios, *costs])
    return markdown(lines) if len(lines) > 1 else _NO_RESULT


def pairing_prediction() -> str:
    """Errors of predicted steps with several micro-batches, and what the planner chose."""
    cases = predictions(with_pairs=True)
    if not cases:
        return _NO_RESULT
    lines = [["case", "configuration", "step (quartiles)", "predicted", "error", "exposed", "predicted"]]
    for quoted, errors in cases:
        for one in errors.comparisons:
            step = f"{one.measured_ms:.0f} ms ({one.low_ms:.0f}-{one.high_ms:.0f})"
            exposed = [f"{ms:.0f} ms" for ms in (one.measured_exposed_ms, one.predicted_exposed_ms)]
            predicted = [f"{one.predicted_ms:.0f} ms", f"{one.error:+.1%}"]
            name = [_linked(one.case, quoted), f"`{one.name}`"]
            lines.append([*name, step, *predicted, *exposed])
    texts, mark = [markdown(lines)], max(quoted.mark for quoted, _ in cases)
    paired = [one for _, errors in cases for one in errors.paired]
    if paired:
        total = totals(paired)
        texts.append(
            f"{total.number} configurations with pairing: error of the step time median {total.median:.1%} (wanted: at "
            f"most {MAX_MEDIAN_ERROR:.0%}), worst {total.worst:.1%} in `{total.worst_name}` (at most {MAX_ERROR:.0%})"
            f"{mark}."
        )
    choices = [
        f"`{errors.name}` {errors.planned_over_fastest:.2f} (fastest: `{errors.fastest}`)"
        for _, errors in cases
        if errors.planned_over_fastest is not None
    ]
    if choices:
        texts.append(
            f"Step of the planner's choice over the fastest configuration's (wanted: at most {1 + MAX_SLOWER:.2f}): "
            f"{', '.join(choices)}{mark}."
        )
    return "\n\n".join(texts)


def _linked(case: str, quoted: Quoted) -> str:
    return f"[`{case}`](results/{quoted.file}){quoted.mark}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _spread(found: Spread) -> str:
    return f"{found.median:.2f} ({found.low:.2f}-{found.high:.2f})"
