"""From raw samples to the table: tokens of documents per second, spread over ranks. Plain Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from textwrap import indent
from typing import Any

from benchmarks.bins.cases import BASELINE
from benchmarks.harness.samples import (
    CaseSamples,
    Spread,
    disturbance_warning,
    disturbed_sweeps,
    mean,
    slower,
    spread,
)
from benchmarks.harness.tables import aligned, markdown

_HEADINGS = (
    "variant",
    "tokens/s",
    f"of {BASELINE}'s, per step",
    "all steps",
    "spread over ranks",
    "waits",
    "padding",
)


@dataclass(frozen=True)
class Row:
    """One variant in one case.

    Attributes:
        tokens_per_s: of documents, on all ranks, all steps.
        over_baseline: paired ratios of the baseline's time of a step to this one's, whose documents are the same.
        all_over_baseline: the same ratio of the time of all steps.
        spread: by how much the quickest rank's compute of a micro-batch is below the slowest rank's, relative to that;
            mean over micro-batches, weighted by the latter.
        waits: share of the steps that compute waited for rows and counts, mean of the ranks.
        padding: share of the computed positions that belong to no document.
        step_ms: mean of the slower rank's.
    """

    name: str
    tokens_per_s: float
    over_baseline: Spread
    all_over_baseline: float
    spread: float
    waits: float
    padding: float
    step_ms: float


@dataclass(frozen=True)
class CaseSummary:
    """One case.

    Attributes:
        documents: of a step on a rank, and their mean tokens.
        num_steps: that were measured with each variant, all sweeps.
        disturbed: numbers of the sweeps that something disturbed, from 1.
    """

    name: str
    title: str
    rate_bps: float
    documents: tuple[int, float]
    num_steps: int
    disturbed: list[int]
    rows: list[Row]


def summarise(case: Mapping[str, Any]) -> CaseSummary:
    """The table's figures of a case of the JSON file."""
    samples = CaseSamples(case)
    return CaseSummary(
        name=case["name"],
        title=case["title"],
        rate_bps=case["rate_bps"],
        documents=(case["documents"]["per_rank"], case["documents"]["mean_tokens"]),
        num_steps=len(samples.all(BASELINE)),
        disturbed=disturbed_sweeps(case),
        rows=[_row(case, samples, name) for name in case["variants"]],
    )


def _row(case: Mapping[str, Any], samples: CaseSamples, name: str) -> Row:
    def times_ms(variant: str) -> list[float]:
        return [slower("step_ms")(ranks) for ranks in samples.all(variant)]

    own, baseline = times_ms(name), times_ms(BASELINE)
    num_tokens = sum(case["num_tokens"])
    steps = samples.all(name)
    return Row(
        name=name,
        tokens_per_s=num_tokens * len(case["sweeps"]) / sum(own) * 1e3,
        over_baseline=spread([ratio for sweep in samples.speedups(name, BASELINE) for ratio in sweep]),
        all_over_baseline=sum(baseline) / sum(own),
        spread=_spread([ranks for sweep in case["sweeps"] for ranks in sweep["compute_ms"][name]]),
        waits=sum(map(mean("exposed_ms"), steps)) / sum(map(mean("step_ms"), steps)),
        padding=1 - num_tokens / sum(case["computed_tokens"][name]),
        step_ms=fmean(own),
    )


def _spread(steps: Sequence[Sequence[Sequence[float]]]) -> float:
    """Over the ranks.

    Args:
        steps: of each step and rank, the compute of its micro-batches.
    """
    columns = [column for ranks in steps for column in zip(*ranks, strict=True)]
    return 1 - sum(map(min, columns)) / sum(map(max, columns))


def as_text(summaries: Sequence[CaseSummary]) -> str:
    """Tables for a terminal."""
    return "\n\n".join(f"{_heading(case)}\n{indent(aligned([_HEADINGS, *_cells(case)]), '  ')}" for case in summaries)


def as_markdown(summaries: Sequence[CaseSummary]) -> str:
    """Tables for a document."""
    return "\n".join(f"### {_heading(case)}\n\n{markdown([_HEADINGS, *_cells(case)])}\n" for case in summaries)


def _heading(case: CaseSummary) -> str:
    warning = f" {disturbance_warning(case.disturbed)}." if case.disturbed else ""
    number, length = case.documents
    return (
        f"{case.name}: {case.title} at {case.rate_bps / 1e6:.0f} Mbit/s; {number} documents of {length:.0f} tokens "
        f"in the mean in a step of a rank, {case.num_steps} steps.{warning}"
    )


def _cells(case: CaseSummary) -> list[tuple[str, ...]]:
    return [
        (
            row.name,
            f"{row.tokens_per_s:.0f}",
            f"{row.over_baseline.median:.2f} ({row.over_baseline.low:.2f} to {row.over_baseline.high:.2f})",
            f"{row.all_over_baseline:.2f}",
            f"{100 * row.spread:.1f} %",
            f"{100 * row.waits:.0f} %",
            f"{100 * row.padding:.0f} %",
        )
        for row in case.rows
    ]
