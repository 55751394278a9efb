"""Tables of the documents that are made from committed results: python -m benchmarks.quoted writes them anew.

A table stands between ``<!-- quoted: NAME -->`` and ``<!-- end -->``. Each case of a benchmark is quoted from the
newest result file that has it; network cases match under any name (:mod:`benchmarks.quoted.network`). The tables next
to each result also come from its samples. Tests compare all tables with the output of this script.
"""

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.auto.quoted import TABLES as AUTO_TABLES
from benchmarks.bridge.quoted import TABLES as BRIDGE_TABLES
from benchmarks.gpu.check.quote import gpu_check
from benchmarks.harness.tables import markdown
from benchmarks.network.cases import CASES, MEGATRON
from benchmarks.network.summary import Row
from benchmarks.prediction.errors import (
    MAX_ERROR,
    MAX_EXPOSED_ERROR,
    MAX_EXPOSED_MS,
    MAX_MEDIAN_ERROR,
    totals,
)
from benchmarks.priority import summary as priority_summary
from benchmarks.priority.cases import NO_PRIORITY
from benchmarks.provenance import link, mark, together
from benchmarks.quoted import beside
from benchmarks.quoted.bins import TABLES as BINS_TABLES
from benchmarks.quoted.cells import NOT_RUN, linked
from benchmarks.quoted.dispatch import dispatch, dispatch_memory, dispatch_prediction, dispatch_variants
from benchmarks.quoted.headline import headline
from benchmarks.quoted.load import TABLES as LOAD_TABLES
from benchmarks.quoted.network import Measured, dates, has_step, network, with_sources
from benchmarks.quoted.nodes import nodes, nodes_prediction, nodes_variants
from benchmarks.quoted.pairing import pairing, pairing_prediction
from benchmarks.quoted.results import Quoted, newest_file, predictions, result, sourced
from benchmarks.quoted.targets import Figure, further_targets, target_row
from benchmarks.quoted.tiles import TABLES as TILES_TABLES

_REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = (
    _REPOSITORY / "README.md",
    _REPOSITORY / "docs" / "performance.md",
    _REPOSITORY / "docs" / "gpus.md",
    *(_REPOSITORY / "docs" / "features" / f"{name}.md" for name in ("bins", "dispatch", "placement")),
    _REPOSITORY / "benchmarks" / "RESULTS.md",
)


def _ours(case: Measured, num_chunks: int, free: bool = False) -> str:
    """Returns the name of our full schedule; along the sequence if the case has no other."""
    where = "free-" if free else ""
    name = f"all-{where}k{num_chunks}"
    return name if case.rows(name) else f"sequence-{where}k{num_chunks}"


def host_time() -> str:
    """The host's time of a step that is all launches, by plan."""
    found = {}
    for name in ("host-time", "host-time-te"):
        samples = result(name)["samples_ms"]
        found[name] = {
            plan: statistics.median(ms / stock for ms, stock in zip(own, samples["stock"], strict=True))
            for plan, own in samples.items()
            if plan != "stock"
        }
    local, te = found.values()
    plans = ", ".join(f"{plan.replace(', ', ' in ')} {ratio:.2f} ({te[plan]:.2f})" for plan, ratio in local.items())
    return (
        f"CPU time of a step that is all launches, over stock's, with local layers (with Transformer Engine's): "
        f"{plans}. *Stock in halves* has twice as many micro-batches with half the samples, so it runs each op twice, "
        f"as two chunks of whole layers do. Where the host limits a step, prefer one chunk or pairs; chunks of the "
        f"experts alone (`--lancet-range experts`) cost the host less than chunks of whole layers "
        f"(`python -m benchmarks.host_time`, {', '.join(map(_linked, found))}). {_host_time_on_gpu()}"
    )


def _linked(name: str) -> str:
    """The newest result named ``name`` plus a date, as a link in docs/gpus.md."""
    path = newest_file(name)
    return link(path.stem, path, "../benchmarks/results")


def _host_time_on_gpu() -> str:
    """The host's time for a layer in the newest check of a device, over stock's."""
    check = result("gpu-check")
    (part,) = (part for part in check["parts"] if part["name"] == "host_time")
    us = {record["name"]: record["us_per_layer"] for record in part["records"] if "groups_us" in record}
    ratios = {name: own / us["stock"] for name, own in us.items() if name != "stock"}
    texts = ", ".join(f"{name.replace(', ', ' with ')} {ratio:.2f}" for name, ratio in ratios.items())
    return (
        f"The same of a layer in the [check of a GPU](#the-newest-check), {_linked('gpu-check')}, where stock has no "
        f"grouped experts: {texts}."
    )


def speed() -> str:
    """Returns speed-up, cut and memory of each case."""
    lines = [["case", "a step is", "stock waits for", "experts in chunks, k=2", "k=4"]]
    lines[0] += ["Megatron's overlap, emulated", "ours, k=2", "k=4", "measured"]
    cases = network()
    for name, case in cases.items():
        newest = case.runs[0]
        names = ["experts-only-k2", "experts-only-k4", MEGATRON, _ours(case, 2), _ours(case, 4)]
        texts = [_speed_cell(case, one) for one in names]
        waits = f"{newest.summary.exposed_share:.1%}"
        lines.append([f"`{name}`", has_step(newest.quoted.case), waits, *texts, dates(case)])
    return with_sources(lines, cases.values())


def _speed_cell(case: Measured, name: str) -> str:
    row = case.row(name)
    return NOT_RUN if row is None else case.cell(name, f"{row.cut:.0%}, memory {row.memory_ratio:.2f}")


def _figures(
    value: Callable[[Row], float | None],
    is_met: Callable[[int, float], bool],
    digits: int,
    cases: Sequence[str],
    free: bool = False,
) -> list[Figure]:
    """A figure of our schedule in each case, with two and with four chunks.

    Args:
        is_met: takes the number of chunks and the figure, rounded as it is printed.
    """
    figures = []
    for name in cases:
        case = network()[name]
        for num_chunks in (2, 4):
            variant = _ours(case, num_chunks, free)
            row = case.row(variant)
            found = None if row is None else value(row)
            if found is not None:
                rounded, mark = round(found, digits), case.mark(variant)
                figures.append(Figure(f"`{name}` k={num_chunks}", rounded, is_met(num_chunks, rounded), mark))
    return figures


def targets() -> str:
    """Returns the targets, and each figure that misses its target."""
    at = {share: [name for name in network() if CASES[name].exposed_share == share] for share in (0.2, 0.45, 0.65)}
    everywhere = list(network())
    percent, ratio = "{:.1%}".format, "{:.2f}".format
    cpu = _figures(lambda row: row.cpu_ratio - 1, lambda k, more: more <= k / 100, 3, everywhere, free=True)
    memory = _figures(lambda row: row.memory_ratio, lambda _, found: found <= 1.15, 2, everywhere)
    lines = [
        ["target", "missed", "where", "elsewhere"],
        target_row(
            "waits cut by 92 % where stock waits for 45 %",
            _figures(lambda row: row.cut, lambda _, cut: cut >= 0.92, 3, at[0.45]),
            percent,
        ),
        target_row(
            "waits cut by 85 % at 65 %",
            _figures(lambda row: row.cut, lambda _, cut: cut >= 0.85, 3, at[0.65]),
            percent,
        ),
        target_row(
            "step at most 1.08 of the bound at 45 %",
            _figures(lambda row: row.over_bound, lambda _, found: found <= 1.08, 2, at[0.45]),
            ratio,
        ),
        target_row(
            "step at most 1.15 of the bound at 65 %",
            _figures(lambda row: row.over_bound, lambda _, found: found <= 1.15, 2, at[0.65]),
            ratio,
        ),
        target_row(
            "not slower than stock at 20 %",
            _figures(lambda row: row.speedup.median, lambda _, found: found >= 1, 2, at[0.2]),
            ratio,
        ),
        target_row("chunks cost at most 2 % of CPU time at k=2, 4 % at k=4, on the free link", cpu, percent),
        target_row("activation memory at most 1.15 of stock's", [*memory, *_sequence(), *_recompute()], ratio),
        *_prediction(),
        *_priority(),
        *further_targets(),
    ]
    return markdown(lines)


def _sequence() -> Iterator[Figure]:
    """Sequence chunks next to batch chunks."""
    for num_chunks in (2, 4):
        row = network()["45"].row(f"sequence-k{num_chunks}")
        if row is not None:
            found = round(row.memory_ratio, 2)
            yield Figure(
                f"`45` along the sequence k={num_chunks}",
                found,
                found <= 1.15,
                network()["45"].mark(f"sequence-k{num_chunks}"),
            )


def _recompute() -> Iterator[Figure]:
    for recompute, peaks in result("activation-memory")["peak_mb"].items():
        for cut, peak in peaks.items():
            if cut != "off":
                where = "no recompute" if recompute == "none" else f"recompute {recompute}"
                ratio = peak / peaks["off"]
                yield Figure(f"{where} {cut}", ratio, round(ratio, 2) <= 1.15, mark(newest_file("activation-memory")))


def _prediction() -> list[list[str]]:
    cases = [errors for _, errors in predictions()]
    mark = together(quoted.mark for quoted, _ in predictions())
    total = totals([one for case in cases for one in case.comparisons])
    median = Figure("median", total.median, total.median <= MAX_MEDIAN_ERROR, mark)
    worst = Figure(f"worst ({total.worst_name})", total.worst, total.worst <= MAX_ERROR, mark)
    close = total.num_exposed_close
    return [
        target_row(
            f"predicted step time within {MAX_MEDIAN_ERROR:.0%} (median) and {MAX_ERROR:.0%} (worst)",
            [median, worst],
            "{:.1%}".format,
        ),
        [
            f"predicted exposed time within {MAX_EXPOSED_ERROR:.0%} or {MAX_EXPOSED_MS:.0f} ms",
            f"{total.number - close} of {total.number}",
            f"all but {close} configurations{mark}",
            "",
        ],
    ]


def _priority() -> list[list[str]]:
    """Compares all-to-alls first with Megatron's ``--overlap-grad-reduce`` and our schedule without the flag."""
    against_overlap, against_none, unflagged = [], [], []
    measured = result("priority")
    for case in measured["cases"]:
        rows = {row.name: row for row in priority_summary.summarise(case).rows}
        mark, name = Quoted(measured["file"], measured["date"], case).mark, f"`{case['name']}`"
        overlapped, none = rows["ours"].over_overlapped, rows["ours"].over_no_priority
        without = rows[NO_PRIORITY].over_overlapped
        assert overlapped is not None
        assert none is not None
        assert without is not None
        against_overlap.append(Figure(name, overlapped.median, overlapped.median >= 1.25, mark))
        against_none.append(Figure(name, none.median, none.median >= 1.08, mark))
        unflagged.append(f"{without.median:.2f}")
    flag, megatron = "`--lancet-comm-priority`", "Megatron's `--overlap-grad-reduce`"
    aim = f"{flag} 1.25x faster than {megatron} (our schedule without the flag: {', '.join(unflagged)})"
    return [
        target_row(aim, against_overlap, "{:.2f}".format),
        target_row(f"{flag} 1.08x faster than our schedule without the flag", against_none, "{:.2f}".format),
    ]


def waiting_cost() -> str:
    """CPU time of stock's step on the shaped link over that on the free one."""
    more = {}
    for name, case in network().items():
        for stock, free in (("stock", "stock-free"), ("stock-sdpa", "stock-sdpa-free")):
            run = next((run for run in case.runs if {stock, free} <= set(run.rows)), None)
            if run is not None:
                more[f"{linked(name, run.quoted)}, `{stock}`"] = run.rows[stock].cpu_ms / run.rows[free].cpu_ms - 1
    least, most = min(more, key=more.__getitem__), max(more, key=more.__getitem__)
    return (
        f"Stock's step needs {more[least]:.0%} ({least}) to {more[most]:.0%} ({most}) more CPU time on the shaped link "
        f"than on the free link, over {len(more)} pairs of runs: the mean of the ranks, threads of gloo included."
    )


def activation_memory() -> str:
    """Peak memory by kind of recompute and of chunks."""
    peaks = result("activation-memory")["peak_mb"]
    lines = [["", *("no recompute" if name == "none" else f"recompute: {name}" for name in peaks)]]
    for cut in peaks["none"]:
        cells = [f"{column[cut]:.1f} MB ({column[cut] / column['off']:.2f})" for column in peaks.values()]
        lines.append([cut, *cells])
    return sourced(markdown(lines), "activation-memory")


def moe_layer() -> str:
    """Ratios of stock's time for one layer to the others', by ranks."""
    sentences = []
    for name in ("moe-layer-1-rank", "moe-layer-2-ranks"):
        measured = result(name)
        ratios: dict[str, list[float]] = {}
        for entry in measured["cases"]:
            for variant, row in entry["summary"].items():
                ratios.setdefault(variant, []).append(row["ratio"])
        ranges = [f"{key} {min(all):.2f} to {max(all):.2f}" for key, all in ratios.items() if key != "stock"]
        where = "1 rank" if measured["ranks"] == 1 else f"{measured['ranks']} ranks"
        sizes = f"{len(measured['cases'])} sizes, {link('samples', newest_file(name), 'results')}"
        sentences.append(f"{where}: {', '.join(ranges)} ({sizes})")
    return f"{'; '.join(sentences)}."


def transport() -> str:
    """Time of an exchange over gloo's own all-to-all and over a group per sender."""
    found = []
    for skew_ms, pairs in result("transport")["samples_ms"].items():
        gloo, own = (
            pairs[name] if isinstance(pairs, dict) else [pair[name] for pair in pairs]
            for name in ("gloo", "per-sender")
        )
        times = (f"{statistics.median(samples):.0f}" for samples in (gloo, own))
        found.append(f"{' and '.join(times)} ms where rank 1 is {float(skew_ms):.0f} ms late")
    return f"By gloo and by sender: {'; '.join(found)} ({link('samples', newest_file('transport'), 'results')})."


def experts() -> str:
    """Experts layer by layer against one by one, of the cases in which the rule chooses either."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for entry in result("experts")["cases"]:
        found[entry["chosen"]].append(entry["median_ratio"])
    layers, single = ((f"{min(ratios):.2f} to {max(ratios):.2f}", len(ratios)) for ratios in found.values())
    return (
        f"Layer by layer is faster by a factor of {layers[0]} in the {layers[1]} cases where the rule chooses it, and "
        f"of {single[0]} in the other {single[1]} ({link('samples', newest_file('experts'), 'results')})."
    )


def weight_grad() -> str:
    """Ratios to a GEMM and an addition for each chunk, over all shapes."""
    columns = {
        "separate addmm_": "`addmm_` of each chunk",
        "joined cat, matmul+add_": "matmul and `add_` of joined chunks",
        "joined cat, addmm_": "`addmm_` of joined chunks",
    }
    cases = [entry["results"] for entry in result("weight-grad")["cases"]]
    ways = []
    for name, words in columns.items():
        ratios = [found[name]["median_ratio"] for found in cases if name in found]
        ways.append(f"{words} is faster by a factor of {min(ratios):.2f} to {max(ratios):.2f} ({len(ratios)} shapes)")
    return f"{'; '.join(ways)} ({link('samples', newest_file('weight-grad'), 'results')})."


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "speed": speed,
    "pairing": pairing,
    "pairing-prediction": pairing_prediction,
    "dispatch": dispatch,
    "dispatch-variants": dispatch_variants,
    "dispatch-prediction": dispatch_prediction,
    "dispatch-memory": dispatch_memory,
    "nodes": nodes,
    "nodes-variants": nodes_variants,
    "nodes-prediction": nodes_prediction,
    "targets": targets,
    "waiting-cost": waiting_cost,
    "activation-memory": activation_memory,
    "moe-layer": moe_layer,
    "transport": transport,
    "experts": experts,
    "weight-grad": weight_grad,
    "gpu-check": gpu_check,
    "host-time": host_time,
    **LOAD_TABLES,
    **TILES_TABLES,
    **AUTO_TABLES,
    **BINS_TABLES,
    **BRIDGE_TABLES,
}
_PLACE = re.compile(r"(<!-- quoted: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """A document with its tables made anew."""
    return _PLACE.sub(lambda place: f"{place[1]}{TABLES[place[2]]()}\n{place[3]}", text)


def main() -> None:
    """Write all documents, and the tables next to the results."""
    beside.write()
    for document in DOCUMENTS:
        document.write_text(with_tables(document.read_text()))
