"""Tables of uneven load: placed experts, causes of waits, replicas in an evaluation, a bound on received rows."""

from benchmarks.causes.summary import CaseSummary as CausesSummary
from benchmarks.causes.summary import Run
from benchmarks.causes.summary import summarise as causes_summary
from benchmarks.evaluation.summary import summarise as evaluation_summary
from benchmarks.harness.tables import markdown
from benchmarks.network.cases import CHUNKED, VARIANTS
from benchmarks.provenance import link, mark
from benchmarks.quoted.cells import NO_RESULT, PASSES, quartiles
from benchmarks.quoted.network import network_of_load
from benchmarks.quoted.results import Quoted, has_result, newest, newest_file, result

_ABOUT_CAUSES = {
    "rows": "uneven rows",
    "pace": "a slow rank",
    "wire": "a slower link",
    "host": "a sleep in the host's path",
}
"""What was injected, by cause."""


def placement() -> str:
    """Experts on the ranks that their load asks for, against the same schedule with Megatron's order."""
    lines = [["case", "variant", "most loaded rank over the mean", PASSES, "exposed"]]
    lines[0] += ["speed-up (quartiles)", f"against `{CHUNKED}`", "memory", "measured"]
    for case, (quoted, summary) in network_of_load().items():
        assert summary.most_loaded is not None
        for row in summary.rows:
            variant = VARIANTS[row.name]
            if variant.free_link:
                continue
            times = [f"{ms:.0f} ms" for ms in (row.step_ms, row.exposed_ms + row.counts_ms)]
            compared = "" if row.over_chunked is None else quartiles(row.over_chunked)
            lines.append(
                [
                    f"`{case}`",
                    f"`{row.name}`",
                    f"{summary.most_loaded[variant.is_placed]:.2f}",
                    *times,
                    quartiles(row.speedup),
                    compared,
                    f"{row.memory_ratio:.2f}",
                    f"[{quoted.date}](../../benchmarks/results/{quoted.file}){quoted.mark}",
                ]
            )
    return markdown(lines) if len(lines) > 1 else NO_RESULT


def causes() -> str:
    """How many injected causes are named first, and how far their sizes are off."""
    found: list[str] = []
    everything: list[Run] = []
    for quoted, summary in _causes_cases():
        runs = summary.runs
        everything += runs
        low, high = (pick(run.injected_ms for run in runs) for pick in (min, max))
        worst = max(runs, key=lambda run: abs(run.off_ms))
        about = f"[{_ABOUT_CAUSES[summary.name]}](results/{quoted.file}){mark(quoted.path)}{_mark(summary)}"
        found.append(
            f"{about}, {low:.1f} to {high:.1f} ms, recovered in {sum(run.is_recovered for run in runs)} of {len(runs)}"
            f", farthest off {worst.off_ms:+.1f} of {worst.with_ms:.0f} ms"
        )
    if not everything:
        return NO_RESULT
    recovered = sum(run.is_recovered for run in everything)
    return (
        f"Named first in {_num_named(everything)} of {len(everything)} runs (target: 19 of 20), recovered in "
        f"{recovered}: {'; '.join(found)}."
    )


def _causes_cases() -> list[tuple[Quoted, CausesSummary]]:
    return [(quoted, causes_summary(quoted.case)) for quoted in newest("causes").values()]


def _num_named(runs: list[Run]) -> int:
    return sum(run.named_first == run.cause for run in runs)


def _mark(summary: CausesSummary) -> str:
    disturbed = sum(run.is_disturbed for run in summary.runs)
    return f" ({disturbed} DISTURBED)" if disturbed else ""


def evaluation() -> str:
    """Speed of an evaluation of skewed text with and without replicas."""
    lines = [["case", "variant", "tokens/s", "batch, median", "95 %", "waits", "fullest rank over the mean"]]
    lines[0] += ["rows that leave their rank", "faster: a batch (quartiles)", "the text"]
    for case, quoted in newest("evaluation").items():
        summary = evaluation_summary(quoted.case)
        marks = mark(quoted.path, bool(summary.disturbed))
        for row in summary.rows:
            times = [f"{ms:.0f} ms" for ms in (row.median_ms, row.high_ms, row.waits_ms)]
            found = [f"{row.most_over_mean:.2f}", f"{row.sent_share:.0%}", quartiles(row.over_baseline)]
            name = f"[`{case}`](results/{quoted.file}){marks}"
            lines.append(
                [name, f"`{row.name}`", f"{row.tokens_per_s:.0f}", *times, *found, f"{row.text_over_baseline:.2f}"]
            )
    return markdown(lines) if len(lines) > 1 else NO_RESULT


def received_rows() -> str:
    """Rows and time of eight workloads, with a bound and without."""
    if not has_result("received-rows"):
        return NO_RESULT
    measured = result("received-rows")
    lines = []
    for words, is_split in (("stay within the bound", False), ("go in up to", True)):
        found = {n: one for n, one in measured["workloads"].items() if bool(one["split_chunks"]) == is_split}
        ratios = [one["ratio"] for one in found.values()]
        rounds = f" {max(one['most_rounds'] for one in found.values())} rounds" if is_split else ""
        rows = max(one["peak_rows"]["with"] for one in found.values())
        lines.append(
            f"Chunks of {', '.join(found)} {words}{rounds}, with at most {rows} rows at a time: {min(ratios):.2f} to "
            f"{max(ratios):.2f} times as long."
        )
    deviation = max(one["deviation"] for one in measured["workloads"].values())
    samples = link("samples", newest_file("received-rows"), "results")
    return " ".join(
        [f"The bound is {measured['bound']} rows.", *lines, f"Deviation at most {deviation:.1e} ({samples})."]
    )


TABLES = {"placement": placement, "causes": causes, "evaluation": evaluation, "received-rows": received_rows}
