"""Rows of the table of targets: each target and the figures that miss it."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.bins.cases import BASELINE
from benchmarks.bins.summary import summarise as bins_summary
from benchmarks.causes.summary import summarise as causes_summary
from benchmarks.from_trace.summary import WANTED as MAX_OP_DIFFERENCE
from benchmarks.from_trace.summary import compare as from_trace_summary
from benchmarks.network.cases import CHUNKED, PAIRED_CASES, VARIANTS
from benchmarks.network.summary import CaseSummary
from benchmarks.prediction import cases as prediction_cases
from benchmarks.prediction.errors import MAX_ERROR, MAX_MEDIAN_ERROR, MAX_SLOWER, CaseErrors, Comparison, totals
from benchmarks.provenance import mark, together
from benchmarks.quoted.network import (
    measured,
    network_of_load,
    network_of_nodes,
    network_of_tiles,
    network_with_dedup,
)
from benchmarks.quoted.results import newest, newest_file, predictions, result, rows_of

_PAIRED_BOUNDS = {"45-m4": 1.10, "45-m8": 1.07, "20-m4": 1.03, "65-m4": 1.04}
"""Targets of the fastest plan's step over its bound, by case."""
_NAMED_SHARE = 0.95
_RATIO, _PERCENT = "{:.2f}".format, "{:.1%}".format


@dataclass(frozen=True)
class Figure:
    """A measured figure to compare with its target."""

    where: str
    value: float
    is_met: bool
    mark: str = ""


def target_row(target: str, figures: Sequence[Figure], text: Callable[[float], str]) -> list[str]:
    """Returns a target's cells: text, number of misses, the misses, and the range of the figures that meet it."""
    missed = [f"{figure.where} {text(figure.value)}{figure.mark}" for figure in figures if not figure.is_met]
    met = [figure for figure in figures if figure.is_met]
    others = ""
    if met:
        low, high = (text(pick(figure.value for figure in met)) for pick in (min, max))
        others = (low if low == high else f"{low} to {high}") + together(figure.mark for figure in met)
    return [target, f"{len(missed)} of {len(figures)}", "; ".join(missed), others]


def further_targets() -> list[list[str]]:
    """Returns the targets of all benchmarks, except targets of the chunked schedule alone."""
    return [*_pairs(), *_dispatch(), *_tiles(), *_load(), *_predictions(), *_causes(), *_bins(), *_from_trace()]


def _pairs() -> Iterator[list[str]]:
    bounds, steady, memory = [], [], []
    for name, case in measured(PAIRED_CASES).items():
        # Each variant from the newest run that has it: a run may have few of them.
        paired = {
            which: row
            for which, variant in VARIANTS.items()
            if variant.plan is not None and variant.plan.is_paired and (row := case.row(which)) is not None
        }
        if not paired:
            continue
        fastest = max(paired.values(), key=lambda row: row.speedup.median)
        marks = case.mark(fastest.name)
        if name in _PAIRED_BOUNDS and fastest.over_bound is not None:
            found = round(fastest.over_bound, 2)
            where = f"`{name}` `{fastest.name}` (target {_PAIRED_BOUNDS[name]:.2f})"
            bounds.append(Figure(where, found, found <= _PAIRED_BOUNDS[name], marks))
        if name.startswith("45") and fastest.steady_over_bound is not None:
            found = round(fastest.steady_over_bound, 2)
            steady.append(Figure(f"`{name}` `{fastest.name}`", found, found <= 1.04, marks))
        for which, row in paired.items():
            found = round(row.memory_ratio, 2)
            memory.append(Figure(f"`{name}` `{which}`", found, found <= 1.15, case.mark(which)))
    yield target_row("pairs: the fastest plan's step close to its bound", bounds, _RATIO)
    yield target_row("pairs: 1.04 of the bound between the ends of a step, at 45 %", steady, _RATIO)
    yield target_row("pairs: activation memory at most 1.15 of stock's", memory, _RATIO)


def _dispatch() -> Iterator[list[str]]:
    saved: list[Figure] = []
    gains = []
    for name, (quoted, summary) in network_with_dedup().items():
        saved += _bytes(name, summary, "dedup-k2", quoted.mark)
        if summary.gain is not None and name.startswith("65"):
            gain = round(summary.gain.speedup.median, 2)
            gains.append(Figure(f"`{name}`", gain, gain >= 1.5, quoted.mark))
    hops = []
    for name, (quoted, summary) in network_of_nodes().items():
        saved += _bytes(name, summary, "two-hop-k2", quoted.mark)
        row = rows_of(summary).get("two-hop-k2")
        if row is not None and row.over_chunked is not None:
            gain = round(row.over_chunked.median, 2)
            hops.append(Figure(f"`{name}`", gain, gain >= 1.4, quoted.mark))
    yield target_row("fewer bytes: within 1 % of the ratio of rows", saved, "{:+.1%}".format)
    yield target_row("one copy per rank at 65 %: 1.5x faster than the fastest plan with duplicates", gains, _RATIO)
    yield target_row(f"two hops at 65 %: 1.4x faster than `{CHUNKED}`", hops, _RATIO)


def _bytes(name: str, summary: CaseSummary, variant: str, mark: str) -> Iterator[Figure]:
    row = rows_of(summary).get(variant)
    if row is not None and row.fewer_bytes is not None and row.fewer_rows is not None:
        off = round(row.fewer_bytes / row.fewer_rows - 1, 3)
        yield Figure(f"`{name}` `{variant}`", off, abs(off) <= 0.01, mark)


def _tiles() -> Iterator[list[str]]:
    speed, first, memory = [], [], []
    for name, (quoted, summary) in network_of_tiles().items():
        rows = {row.name: row for row in summary.rows if not VARIANTS[row.name].free_link}
        tiled = [row for row in rows.values() if VARIANTS[row.name].is_tiled and not row.name.endswith("-k2")]
        best = max(tiled, key=lambda row: row.speedup.median)
        where, gain = f"`{name}` `{best.name}`", round(best.speedup.median, 2)
        others = max(row.speedup.median for row in rows.values() if not VARIANTS[row.name].is_tiled)
        if name.startswith("45"):
            speed.append(Figure(where, gain, gain >= 1.3, quoted.mark))
        else:
            over = round(best.speedup.median / others, 2)
            first.append(Figure(where, over, over >= 1, quoted.mark))
        for row in tiled:
            found = round(row.memory_ratio, 2)
            memory.append(Figure(f"`{name}` `{row.name}`", found, found <= 1.01, quoted.mark))
    yield target_row("tiles in one chunk at 45 %: 1.3x faster than stock", speed, _RATIO)
    yield target_row("tiles in one chunk at 20 %: as fast as the fastest other variant", first, _RATIO)
    yield target_row("tiles in one chunk: activation memory at most 1.01 of stock's", memory, _RATIO)


def _load() -> Iterator[list[str]]:
    gains = []
    for name, (quoted, summary) in network_of_load().items():
        found = rows_of(summary)["placed-k2"].over_chunked
        assert found is not None
        gains.append(Figure(f"`{name}`", round(found.median, 2), found.median >= 1.15, quoted.mark))
    yield target_row(f"placed experts (an oracle): 1.15x faster than `{CHUNKED}`", gains, _RATIO)


def _predictions() -> Iterator[list[str]]:
    groups: list[tuple[str, Collection[str], Callable[[CaseErrors], Sequence[Comparison]]]] = [
        ("with pairs", prediction_cases.PAIRED_CASES, lambda errors: errors.paired),
        ("with one copy per rank", prediction_cases.DISPATCH_CASES, lambda errors: errors.comparisons),
        ("of two nodes", prediction_cases.NODES_CASES, lambda errors: errors.comparisons),
        ("with tiles", prediction_cases.TILED_CASES, lambda errors: errors.tiled),
    ]
    for about, names, counted in groups:
        found = predictions(names)
        compared = [comparison for _, errors in found for comparison in counted(errors)]
        if not compared:
            continue
        total, mark = totals(compared), together(quoted.mark for quoted, _ in found)
        figures = [
            Figure("median", total.median, total.median <= MAX_MEDIAN_ERROR, mark),
            Figure(f"worst (`{total.worst_name}`)", total.worst, total.worst <= MAX_ERROR, mark),
        ]
        target = f"predicted steps {about} within {MAX_MEDIAN_ERROR:.0%} (median) and {MAX_ERROR:.0%} (worst)"
        yield target_row(target, figures, _PERCENT)
    choices = [
        Figure(f"`{errors.name}`", chosen, chosen <= 1 + MAX_SLOWER, quoted.mark)
        for quoted, errors in predictions(tuple(prediction_cases.CASES))
        if (chosen := errors.planned_over_fastest) is not None
    ]
    yield target_row(f"the planner's choice at most {1 + MAX_SLOWER:.2f} of the fastest plan", choices, "{:.3f}".format)


def _causes() -> Iterator[list[str]]:
    runs, marks = [], []
    for quoted in newest("causes").values():
        own = causes_summary(quoted.case).runs
        runs += own
        marks.append(mark(quoted.path, any(run.is_disturbed for run in own)))
    if runs:
        of_all = together(marks)
        named = sum(run.named_first == run.cause for run in runs) / len(runs)
        recovered = sum(run.is_recovered for run in runs) / len(runs)
        yield target_row(
            "injected causes of waits: named first in 19 of 20 runs, their size found in as many",
            [
                Figure("named first", named, named >= _NAMED_SHARE, of_all),
                Figure("size found", recovered, recovered >= _NAMED_SHARE, of_all),
            ],
            "{:.0%}".format,
        )


def _bins() -> Iterator[list[str]]:
    speed, padding, spreads = [], [], []
    for name, quoted in newest("bins").items():
        rows = bins_summary(quoted.case).rows
        padded = {row.name: row.tokens_per_s for row in rows if row.name in ("padded", "rows")}
        for row in rows:
            where = f"`{name}` `{row.name}`"
            if row.name == "balanced":
                gain = round(row.all_over_baseline, 2)
                speed.append(Figure(where, gain, gain >= 1.15, quoted.mark))
                for which, tokens_per_s in padded.items():
                    over = round(row.tokens_per_s / tokens_per_s, 2)
                    padding.append(Figure(f"`{name}` over `{which}`", over, over >= 2, quoted.mark))
                spreads.append(Figure(where, row.spread, round(row.spread, 3) < 0.05, quoted.mark))
    yield target_row(f"balanced bins: 1.15x the tokens per second of `{BASELINE}`", speed, _RATIO)
    yield target_row("balanced bins: 2x the tokens per second of padding", padding, _RATIO)
    yield target_row("balanced bins: ranks' compute within 5 %", spreads, _PERCENT)


def _from_trace() -> Iterator[list[str]]:
    cases = [from_trace_summary(case) for case in result("from_trace")["cases"]]
    ops = [pair for case in cases for pair in case.whole]
    equal = sum(pair.is_equal for pair in ops)
    of_all = mark(newest_file("from_trace"), any(case.is_disturbed for case in cases))
    missed = f"all but {equal} ops{of_all}" if equal < len(ops) else ""
    target = f"a profile from traces: each op within {MAX_OP_DIFFERENCE:.0%} of our profiler's"
    yield [target, f"{len(ops) - equal} of {len(ops)}", missed, ""]
