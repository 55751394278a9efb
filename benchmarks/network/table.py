"""The results as text for a terminal and as markdown."""

from collections.abc import Sequence

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
        f"{row.forward_ms:.0f}",
        f"{row.backward_ms:.0f}",
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
        which = ", ".join(map(str, case.disturbed))
        lines.append(f"DISTURBED: something else used the processor during sweep {which}; don't quote these figures")
    return lines


def _lines(case: CaseSummary) -> tuple[list[list[str]], bool]:
    has_rest = any(row.rest_ms > 0 for row in case.rows)
    return [headings(has_rest), *(cells(row, has_rest) for row in case.rows)], has_rest


def _references(rows: Sequence[Row]) -> str:
    """Which variants are compared with which."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row.name != VARIANTS[row.name].reference:
            groups.setdefault(row.reference, []).append(row.name)
    return "; ".join(f"{', '.join(names)} against {reference}" for reference, names in groups.items())


def as_text(cases: Sequence[CaseSummary]) -> str:
    """Aligned columns."""
    blocks = []
    for case in cases:
        table, _ = _lines(case)
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        aligned = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        blocks.append("\n".join([*description(case), *(f"  {line}" for line in aligned)]))
    return "\n\n".join(blocks)


def as_markdown(cases: Sequence[CaseSummary]) -> str:
    """A heading, a paragraph and a table for each case."""
    blocks = []
    for case in cases:
        table, _ = _lines(case)
        head, *body = (f"| {' | '.join(line)} |" for line in table)
        rule = "|" + "---|" * len(table[0])
        text = ". ".join(description(case))
        blocks.append(
            f"### {case.name}\n\n{text}. Compared: {_references(case.rows)}.\n\n" + "\n".join([head, rule, *body])
        )
    return "\n\n".join(blocks) + "\n"
