"""Tables of tiles: rows that go to other ranks in parts while experts work on others."""

from benchmarks.harness.tables import markdown
from benchmarks.network.cases import CHUNKED, VARIANTS
from benchmarks.prediction.cases import TILED_CASES
from benchmarks.quoted.cells import NO_RESULT, PASSES, linked, prediction_tables, quartiles, ratio
from benchmarks.quoted.network import network_of_tiles


def tiles_variants() -> str:
    """Every variant of the cases with tiles."""
    spreads = (row.speedup for _, summary in network_of_tiles().values() for row in summary.rows)
    ends = " or ".join(sorted({found.ends for found in spreads}))
    lines = [["case", "variant", PASSES, "exposed", "step/bound", f"speed-up ({ends})", f"against `{CHUNKED}`"]]
    lines[0] += ["CPU", "memory"]
    for case, (quoted, summary) in network_of_tiles().items():
        for row in summary.rows:
            if VARIANTS[row.name].free_link:
                continue
            ratios = [ratio(row.over_bound), quartiles(row.speedup)]
            ratios += ["" if row.over_chunked is None else quartiles(row.over_chunked)]
            times = [f"{ms:.0f} ms" for ms in (row.step_ms, row.exposed_ms + row.counts_ms)]
            costs = [f"{row.cpu_ratio:.2f}", f"{row.memory_ratio:.3f}"]
            lines.append([linked(case, quoted), f"`{row.name}`", *times, *ratios, *costs])
    return markdown(lines) if len(lines) > 1 else NO_RESULT


def tiles_prediction() -> str:
    """Errors of predicted steps with tiles, and what the planner chose."""
    return prediction_tables(TILED_CASES, lambda errors: errors.tiled, "configurations with tiles")


TABLES = {"tiles-variants": tiles_variants, "tiles-prediction": tiles_prediction}
