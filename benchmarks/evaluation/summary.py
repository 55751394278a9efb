"""From raw samples to the table: tokens per second, median and 95 % of a batch, paired ratios. Plain Python."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from benchmarks.evaluation.cases import BASELINE
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
    "batch ms, median",
    "95 %",
    "waits ms",
    "MB a rank sends",
    "fullest rank",
    "rows that leave",
    "faster: a batch",
    "the text",
)


@dataclass(frozen=True)
class Row:
    """One variant in one case.

    Attributes:
        tokens_per_s: of the whole text, all passes.
        median_ms: of a batch, on the slower rank.
        high_ms: the time that 95 % of the batches stay below.
        waits_ms: for rows and counts, mean of the ranks, median of the batches.
        sent_bytes: rows that a rank sends in a batch, the larger one, median.
        most_over_mean: rows of the fullest rank over the mean that were expected.
        sent_share: share of the rows that were expected to leave their rank.
        over_baseline: paired ratios of the baseline's time of a batch to this one's.
        text_over_baseline: the same ratio of the time of the whole text.
    """

    name: str
    tokens_per_s: float
    median_ms: float
    high_ms: float
    waits_ms: float
    sent_bytes: float
    most_over_mean: float
    sent_share: float
    over_baseline: Spread
    text_over_baseline: float


@dataclass(frozen=True)
class CaseSummary:
    """One case.

    Attributes:
        exposed_share: of a batch that the baseline waited.
        num_batches: of the text.
        disturbed: numbers of the sweeps that something disturbed, from 1.
    """

    name: str
    title: str
    rate_bps: float
    exposed_share: float
    num_batches: int
    disturbed: list[int]
    rows: list[Row]


def summarise(case: Mapping[str, Any]) -> CaseSummary:
    """The table's figures of a case of the JSON file."""
    samples = CaseSamples(case)
    exposed, step = samples.median(BASELINE, mean("exposed_ms")), samples.median(BASELINE, slower("step_ms"))
    return CaseSummary(
        name=case["name"],
        title=case["title"],
        rate_bps=case["rate_bps"],
        exposed_share=exposed / step,
        num_batches=len(samples.sweeps[0][BASELINE]),
        disturbed=disturbed_sweeps(case),
        rows=[_row(case, samples, name) for name in case["variants"]],
    )


def _row(case: Mapping[str, Any], samples: CaseSamples, name: str) -> Row:
    def times_ms(variant: str) -> list[float]:
        return [slower("step_ms")(ranks) for ranks in samples.all(variant)]

    own = times_ms(name)
    ratios = samples.speedups(name, BASELINE)
    return Row(
        name=name,
        tokens_per_s=case["tokens_per_batch"] * len(own) / sum(own) * 1e3,
        median_ms=statistics.median(own),
        high_ms=statistics.quantiles(own, n=20, method="inclusive")[-1],
        waits_ms=samples.median(name, mean("exposed_ms")),
        sent_bytes=samples.median(name, slower("payload_bytes")),
        most_over_mean=case["expected"][name]["most_over_mean"],
        sent_share=case["expected"][name]["sent_share"],
        over_baseline=spread([ratio for sweep in ratios for ratio in sweep]),
        text_over_baseline=sum(times_ms(BASELINE)) / sum(own),
    )


def as_text(summaries: Sequence[CaseSummary]) -> str:
    """Tables for a terminal."""
    return "\n\n".join(f"{_heading(case)}\n{indent(aligned([_HEADINGS, *_cells(case)]), '  ')}" for case in summaries)


def as_markdown(summaries: Sequence[CaseSummary]) -> str:
    """Tables for a document."""
    return "\n".join(f"### {_heading(case)}\n\n{markdown([_HEADINGS, *_cells(case)])}\n" for case in summaries)


def _heading(case: CaseSummary) -> str:
    warning = f" {disturbance_warning(case.disturbed)}." if case.disturbed else ""
    return (
        f"{case.name}: {case.title}; {case.rate_bps / 1e6:.0f} Mbit/s, {100 * case.exposed_share:.0f} % of a batch "
        f"waited for, {case.num_batches} batches.{warning}"
    )


def _cells(case: CaseSummary) -> list[tuple[str, ...]]:
    return [
        (
            row.name,
            f"{row.tokens_per_s:.0f}",
            f"{row.median_ms:.1f}",
            f"{row.high_ms:.1f}",
            f"{row.waits_ms:.1f}",
            f"{row.sent_bytes / 1e6:.2f}",
            f"{row.most_over_mean:.2f}",
            f"{100 * row.sent_share:.0f} %",
            f"{row.over_baseline.median:.2f} ({row.over_baseline.low:.2f} to {row.over_baseline.high:.2f})",
            f"{row.text_over_baseline:.2f}",
        )
        for row in case.rows
    ]
