"""The results as text for a terminal and as markdown."""

from collections.abc import Sequence
from textwrap import indent

from benchmarks.harness.samples import disturbance_warning
from benchmarks.harness.tables import aligned, markdown
from benchmarks.network.cases import VARIANTS
from benchmarks.network.summary import CaseSummary, Row

_HEADINGS = (
    "variant",
    "step ms",
    "forward",
    "backward",
    "exposed",
    "counts",
    "cut",
    "step/bound",
    "/passes",
    "CPU",
    "memory",
    "speedup (quartiles)",
    "sweeps",
)
_REST = "reduce+opt"


def headings(has_rest: bool) -> list[str]:
    """Of the columns."""
    names = list(_HEADINGS)
    if has_rest:
        names.insert(names.index("exposed"), _REST)
    return names


def cells(row: Row, has_rest: bool) -> list[str]:
    """A variant's line."""
    line = [
        row.name,
        f"{row.step_ms:.0f}",
        "" if row.forward_ms is None else f"{row.forward_ms:.0f}",
        "" if row.backward_ms is None else f"{row.backward_ms:.0f}",
        f"{row.exposed_ms:.1f}",
        f"{row.counts_ms:.1f}",
        "" if row.cut is None else f"{row.cut:.1%}",
        "" if row.over_bound is None else f"{row.over_bound:.2f}",
        "" if row.over_passes is None else f"{row.over_passes:.2f}",
        f"{row.cpu_ratio:.3f}",
        f"{row.memory_ratio:.2f}",
        f"{row.speedup.median:.3f} ({row.speedup.low:.2f}-{row.speedup.high:.2f})",
        " ".join(f"{speedup:.2f}" for speedup in row.sweep_speedups),
    ]
    if has_rest:
        line.insert(_HEADINGS.index("exposed"), f"{row.rest_ms:.0f}")
    return line


def description(case: CaseSummary) -> list[str]:
    """What the figures of a case refer to, and whether they are to be trusted."""
    low, high = case.shares
    lines = [
        f"{case.title}: {case.rate_bps / 1e6:.0f} Mbit/s, stock exposes {case.exposed_share:.1%} of its step; "
        f"compute {case.compute_ms:.0f} ms, link {case.link_ms:.0f} ms; experts get {low:.1%} to {high:.1%} of the rows"
    ]
    if case.link_ms > case.compute_ms:
        lines.append(
            f"the link takes longer than stock's compute: a cut of {case.reachable_cut:.0%} is all that can be reached"
        )
    if case.disturbed:
        lines.append(disturbance_warning(case.disturbed))
    return lines


def _lines(case: CaseSummary) -> list[list[str]]:
    has_rest = any(row.rest_ms > 0 for row in case.rows)
    return [headings(has_rest), *(cells(row, has_rest) for row in case.rows)]


def _references(rows: Sequence[Row]) -> str:
    """Which variants are compared with which."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row.name != VARIANTS[row.name].reference:
            groups.setdefault(row.reference, []).append(row.name)
    return "; ".join(f"{', '.join(names)} against {reference}" for reference, names in groups.items())


def as_text(cases: Sequence[CaseSummary]) -> str:
    """Aligned columns."""
    return "\n\n".join("\n".join([*description(case), indent(aligned(_lines(case)), "  ")]) for case in cases)


def as_markdown(cases: Sequence[CaseSummary]) -> str:
    """A heading, a paragraph and a table for each case."""
    blocks = []
    for case in cases:
        text = ". ".join(description(case))
        blocks.append(f"### {case.name}\n\n{text}. Compared: {_references(case.rows)}.\n\n{markdown(_lines(case))}")
    return "\n\n".join(blocks) + "\n"
