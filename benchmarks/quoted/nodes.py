"""Tables of two nodes of two ranks: a token travels once to a node, and from there once to a rank."""

from benchmarks.harness.tables import markdown
from benchmarks.network.cases import CHUNKED, VARIANTS
from benchmarks.network.table import fewer_bytes
from benchmarks.prediction.cases import NODES_CASES
from benchmarks.quoted.cells import NO_RESULT, PASSES, linked, prediction_tables, quartiles, ratio
from benchmarks.quoted.network import network_of_nodes
from benchmarks.quoted.results import predictions, rows_of

_SAME_CHUNKS = "two-hop-k2"


def nodes() -> str:
    """Rows and bytes between nodes, and two hops against the same chunks and against the fastest without."""
    lines = [["case", "stock waits for", "rows a token between nodes", "fewer bytes between nodes"]]
    lines[0] += [f"`{_SAME_CHUNKS}` against `{CHUNKED}` (quartiles)", "fastest without two hops", "with"]
    lines[0] += ["the latter is faster by (quartiles)", "measured"]
    for name, (quoted, summary) in network_of_nodes().items():
        rows, gain, sent = rows_of(summary), summary.gain, summary.sent_rows
        if gain is None or sent is None or sent.two_hop is None or _SAME_CHUNKS not in rows:  # a run of few variants
            continue
        same_chunks = rows[_SAME_CHUNKS].over_chunked
        found = [
            f"{sent.plain:.2f}, to a rank once {sent.dedup:.2f}, to a node once {sent.two_hop:.2f}",
            fewer_bytes(rows[_SAME_CHUNKS]),
            "" if same_chunks is None else quartiles(same_chunks),
            *(f"`{which}` {rows[which].speedup.median:.2f}" for which in (gain.other, gain.name)),
            quartiles(gain.speedup),
            f"[{quoted.date}](../../benchmarks/results/{quoted.file}){quoted.mark}",
        ]
        lines.append([f"`{name}`", f"{summary.exposed_share:.1%}", *found])
    return markdown(lines) if len(lines) > 1 else NO_RESULT


def nodes_variants() -> str:
    """Every variant of every case with two nodes."""
    lines = [["case", "variant", PASSES, "exposed", "step/bound", "sent by a node", "fewer bytes"]]
    lines[0] += ["speed-up (quartiles)", f"against `{CHUNKED}`", "CPU", "memory"]
    for case, (quoted, summary) in network_of_nodes().items():
        for row in summary.rows:
            if VARIANTS[row.name].free_link:
                continue
            times = [f"{ms:.0f} ms" for ms in (row.step_ms, row.exposed_ms + row.counts_ms)]
            sent = "" if row.sent_bytes is None else f"{row.sent_bytes / 1e6:.2f} MB"
            ratios = [ratio(row.over_bound), sent, fewer_bytes(row), quartiles(row.speedup)]
            ratios += ["" if row.over_chunked is None else quartiles(row.over_chunked)]
            costs = [f"{row.cpu_ratio:.2f}", f"{row.memory_ratio:.2f}"]
            lines.append([linked(case, quoted), f"`{row.name}`", *times, *ratios, *costs])
    return markdown(lines) if len(lines) > 1 else NO_RESULT


def nodes_prediction() -> str:
    """Errors of predicted steps of two nodes, and which dispatch the planner chose on which link."""
    text = prediction_tables(NODES_CASES, lambda errors: errors.comparisons, "configurations")
    chosen = [
        f"`{errors.name}` {errors.planned_dispatch}{quoted.mark}"
        for quoted, errors in predictions(NODES_CASES)
        if errors.planned_dispatch is not None
    ]
    return f"{text}\n\nDispatch of the planner's choice: {', '.join(chosen)}." if chosen else text
