"""Tables of deduplicated dispatch: a token travels once to a rank, not once to each of its experts there."""

from benchmarks.harness.tables import markdown
from benchmarks.network.cases import VARIANTS
from benchmarks.network.table import fewer_bytes
from benchmarks.prediction.cases import DISPATCH_CASES
from benchmarks.provenance import link
from benchmarks.quoted.cells import NO_RESULT, PASSES, linked, prediction_tables, quartiles, ratio
from benchmarks.quoted.network import network_with_dedup
from benchmarks.quoted.results import newest_file, result, rows_of

_MEMORY_KEY = "top_4_peak_mb"


def dispatch() -> str:
    """Bytes, by the routing and on the wire, and the fastest plan with duplicates against the fastest without."""
    lines = [["case", "stock waits for", "fewer rows by the routing", "fewer bytes on the wire"]]
    lines[0] += ["fastest with duplicates", "without", "the latter is faster by (quartiles)", "measured"]
    for name, (quoted, summary) in network_with_dedup().items():
        rows, gain, sent = rows_of(summary), summary.gain, summary.sent_rows
        if gain is None or sent is None:  # a run of few variants
            continue
        speedups = [f"`{which}` {rows[which].speedup.median:.2f}" for which in (gain.other, gain.name)]
        fewer = [f"{sent.fewer(gain.dispatch):.2f}", fewer_bytes(rows[gain.name])]
        source = f"[{quoted.date}](../../benchmarks/results/{quoted.file}){quoted.mark}"
        found = [*fewer, *speedups, quartiles(gain.speedup), source]
        lines.append([f"`{name}`", f"{summary.exposed_share:.1%}", *found])
    return markdown(lines) if len(lines) > 1 else NO_RESULT


def dispatch_variants() -> str:
    """Every variant of every case in which a token may travel once to a rank."""
    lines = [["case", "variant", PASSES, "exposed", "step/bound", "sent", "fewer bytes", "speed-up (quartiles)"]]
    lines[0] += ["CPU", "memory"]
    for case, (quoted, summary) in network_with_dedup().items():
        for row in summary.rows:
            if VARIANTS[row.name].free_link:
                continue
            times = [f"{ms:.0f} ms" for ms in (row.step_ms, row.exposed_ms + row.counts_ms)]
            sent = "" if row.sent_bytes is None else f"{row.sent_bytes / 1e6:.2f} MB"
            ratios = [ratio(row.over_bound), sent, fewer_bytes(row), quartiles(row.speedup)]
            costs = [f"{row.cpu_ratio:.2f}", f"{row.memory_ratio:.2f}"]
            lines.append([linked(case, quoted), f"`{row.name}`", *times, *ratios, *costs])
    return markdown(lines) if len(lines) > 1 else NO_RESULT


def dispatch_prediction() -> str:
    """Errors of predicted steps with top-4, and what the planner chose."""
    return prediction_tables(DISPATCH_CASES, lambda errors: errors.comparisons, "configurations")


def dispatch_memory() -> str:
    """Peak memory with top-4 under full recompute, of both kinds of dispatch."""
    found = result("activation-memory")
    if _MEMORY_KEY not in found:
        return NO_RESULT
    peaks: dict[str, dict[str, float]] = found[_MEMORY_KEY]
    stock_mb = peaks["plain"]["off"]
    cells = [
        f"{cut} {', '.join(f'{column[cut] / stock_mb:.2f} {name}' for name, column in peaks.items())}"
        for cut in peaks["dedup"]
    ]
    return f"{'; '.join(cells)} ({link('samples', newest_file('activation-memory'), 'results')})."
