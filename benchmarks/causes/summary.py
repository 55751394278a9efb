"""From what was found in each step to a table: was the cause named, and its size recovered? Plain Python."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.samples import all_exposed, by_rank
from benchmarks.harness.tables import aligned, markdown
from megatron_lancet.lab.causes.replay import Cause

TOLERANCE_SHARE, TOLERANCE_MS = 0.10, 5.0
"""A size is recovered when it is off by at most this share of the step's exposed time, or by so much."""
_HEADINGS = (
    "cause",
    "size",
    "plan",
    "without",
    "with",
    "injected",
    "alone",
    "off",
    "part",
    "named first",
    "unexplained",
)


@dataclass(frozen=True)
class Run:
    """One run; times are ms of a step, mean of the ranks, medians over the steps.

    Attributes:
        without_ms: exposed time without the cause.
        with_ms: exposed time with it.
        injected_ms: median of the differences of steps that follow each other.
        found_ms: by cause, the same of its part in what was found.
        alone_ms: the same of what goes if the injected cause alone goes: that is what was injected.
        unexplained_ms: of the steps with the cause.
    """

    cause: str
    size: float
    plan: str
    without_ms: float
    with_ms: float
    injected_ms: float
    found_ms: dict[str, float]
    alone_ms: float
    unexplained_ms: float
    is_disturbed: bool

    @property
    def off_ms(self) -> float:
        """How far what would go without the cause is from what was injected."""
        return self.alone_ms - self.injected_ms

    @property
    def is_recovered(self) -> bool:
        """Whether the size was found."""
        return abs(self.off_ms) <= max(TOLERANCE_MS, TOLERANCE_SHARE * self.with_ms)

    @property
    def named_first(self) -> str:
        """The cause whose part rose most."""
        return max(self.found_ms, key=lambda cause: self.found_ms[cause])


@dataclass(frozen=True)
class CaseSummary:
    """The runs of one cause."""

    name: str
    title: str
    rate_bps: float
    runs: list[Run]


def summarise(case: Mapping[str, Any]) -> CaseSummary:
    """The table's figures of a case of the JSON file."""
    runs = [_run(case["name"], case["sample_fields"], run) for run in case["runs"]]
    return CaseSummary(case["name"], case["title"], case["rate_bps"], runs)


def _run(cause: str, fields: Sequence[str], run: Mapping[str, Any]) -> Run:
    exposed: dict[str, list[float]] = {
        name: [all_exposed(ranks) for ranks in by_rank(fields, [step["samples"] for step in steps])]
        for name, steps in run["steps"].items()
    }
    parts = {
        name: [{one: part["ms"] for one, part in step["causes"]["parts"].items()} for step in steps]
        for name, steps in run["steps"].items()
    }
    pairs = list(zip(parts["without"], parts["with"], strict=True))
    return Run(
        cause=cause,
        size=run["size"],
        plan=run["plan"],
        without_ms=statistics.median(exposed["without"]),
        with_ms=statistics.median(exposed["with"]),
        injected_ms=_median_difference(exposed["without"], exposed["with"]),
        found_ms={str(one): statistics.median(after[one] - before[one] for before, after in pairs) for one in Cause},
        alone_ms=_median_difference(
            *(
                [step["causes"]["parts"][cause]["alone_ms"] for step in run["steps"][name]]
                for name in ("without", "with")
            )
        ),
        unexplained_ms=statistics.median(step["causes"]["unexplained_ms"] for step in run["steps"]["with"]),
        is_disturbed=run["disturbance"]["is_disturbed"],
    )


def _median_difference(before: Sequence[float], after: Sequence[float]) -> float:
    return statistics.median(b - a for a, b in zip(before, after, strict=True))


def _table(runs: Sequence[Run]) -> list[list[str]]:
    lines = [
        [
            run.cause + (" (DISTURBED)" if run.is_disturbed else ""),
            f"{run.size:g}",
            run.plan,
            *(f"{ms:.1f}" for ms in (run.without_ms, run.with_ms, run.injected_ms, run.alone_ms)),
            f"{run.off_ms:+.1f}" + ("" if run.is_recovered else " !"),
            f"{run.found_ms[run.cause]:.1f}",
            run.named_first + ("" if run.named_first == run.cause else " !"),
            f"{run.unexplained_ms:.1f}",
        ]
        for run in runs
    ]
    return [list(_HEADINGS), *lines]


def _result(cases: Sequence[CaseSummary]) -> str:
    runs = [run for case in cases for run in case.runs]
    named = sum(run.named_first == run.cause for run in runs)
    recovered = sum(run.is_recovered for run in runs)
    worst = max(runs, key=lambda run: abs(run.off_ms))
    return (
        f"the injected cause is named first in {named} of {len(runs)} runs, its size recovered within "
        f"{TOLERANCE_SHARE:.0%} of the exposed time or {TOLERANCE_MS:g} ms in {recovered}; farthest off "
        f"{worst.off_ms:+.1f} of {worst.with_ms:.1f} ms ({worst.cause})"
    )


def as_text(cases: Sequence[CaseSummary]) -> str:
    """Aligned columns, and the result in a sentence."""
    return f"{aligned(_table([run for case in cases for run in case.runs]))}\n\n{_result(cases)}"


def as_markdown(cases: Sequence[CaseSummary]) -> str:
    """The same."""
    titles = "\n".join(f"- *{case.name}*: {case.title}" for case in cases)
    runs = [run for case in cases for run in case.runs]
    return f"{titles}\n\n{markdown(_table(runs))}\n\n{_result(cases).capitalize()}.\n"
