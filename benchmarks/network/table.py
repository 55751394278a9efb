"""The results as text for a terminal and as markdown."""

from collections.abc import Sequence
from textwrap import indent

from benchmarks.harness.samples import Spread, disturbance_warning
from benchmarks.harness.tables import aligned, markdown
from benchmarks.network.cases import CHUNKED, VARIANTS
from benchmarks.network.summary import CaseSummary, Row, SentRows
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP

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
_OPTIONAL = {
    "reduce+opt": "exposed",
    "steady/bound": "CPU",
    "sent MB": "CPU",
    "fewer bytes": "CPU",
    f"against {CHUNKED}": "sweeps",
}
"""Columns that a case may have, each with the one that it stands in front of."""


def fewer_bytes(row: Row) -> str:
    """By what a variant divides the bytes, and how far that is from what it does with the rows; else nothing."""
    if row.fewer_bytes is None or row.fewer_rows is None:
        return ""
    return f"{row.fewer_bytes:.3f} ({row.fewer_bytes / row.fewer_rows - 1:+.1%})"


def _optional_cells(row: Row, sent_rows: SentRows | None) -> dict[str, str]:
    steady, over_chunked = row.steady_over_bound, row.over_chunked
    return dict(
        zip(
            _OPTIONAL,
            (
                f"{row.rest_ms:.0f}" if row.rest_ms > 0 else "",
                "" if steady is None else f"{steady:.2f}",
                "" if sent_rows is None or row.sent_bytes is None else f"{row.sent_bytes / 1e6:.2f}",
                fewer_bytes(row),
                "" if over_chunked is None else _spread(over_chunked),
            ),
            strict=True,
        )
    )


def _spread(found: Spread) -> str:
    return f"{found.median:.3f} ({found.low:.2f}-{found.high:.2f})"


def _cells(row: Row) -> list[str]:
    return [
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
        _spread(row.speedup),
        " ".join(f"{speedup:.2f}" for speedup in row.sweep_speedups),
    ]


_FASTEST = {
    DEDUP: ("without duplicates", "with them"),
    TWO_HOP: ("with two hops", "without them"),
}


def _rows(sent: SentRows) -> str:
    if sent.two_hop is None:
        return (
            f"by the routing a token sends {sent.plain:.2f} rows to other ranks, {sent.dedup:.2f} without duplicates: "
            f"{sent.fewer(DEDUP):.3f} times fewer"
        )
    return (
        f"by the routing a token sends {sent.plain:.2f} rows to other nodes, {sent.dedup:.2f} if it goes once to a "
        f"rank ({sent.fewer(DEDUP):.3f} times fewer), {sent.two_hop:.2f} if it goes once to a node "
        f"({sent.fewer(TWO_HOP):.3f} times fewer)"
    )


def description(case: CaseSummary) -> list[str]:
    """What the figures of a case refer to, and whether they are to be trusted."""
    low, high = case.shares
    lines = [
        f"{case.title}: {case.rate_bps / 1e6:.0f} Mbit/s, stock exposes {case.exposed_share:.1%} of its step; "
        f"compute {case.compute_ms:.0f} ms, link {case.link_ms:.0f} ms; experts get {low:.1%} to {high:.1%} of the rows"
    ]
    rest = any(row.rest_ms > 0 for row in case.rows)
    lines.append(f"a step is {'forward, backward, gradient reduction and Adam' if rest else 'forward and backward'}")
    emulated = [row.name for row in case.rows if VARIANTS[row.name].overlaps_micro_batches]
    if emulated:
        lines.append(f"{', '.join(emulated)}: an emulation in which threads stand for Megatron's streams")
    if case.link_ms > case.compute_ms:
        lines.append(
            f"the link takes longer than stock's compute: a cut of {case.reachable_cut:.0%} is all that can be reached"
            f"{'' if case.sent_rows is None else ' with as many bytes'}"
        )
    if case.sent_rows is not None:
        lines.append(_rows(case.sent_rows))
    if case.gain is not None:
        gain, fastest = case.gain, _FASTEST[case.gain.dispatch]
        lines.append(
            f"{gain.name}, the fastest {fastest[0]}, is {_spread(gain.speedup)} times as fast as {gain.other}, "
            f"the fastest {fastest[1]}"
        )
    if case.most_loaded is not None:
        before, after = case.most_loaded
        lines.append(
            f"the most loaded rank works on {before:.2f} times the mean of the ranks, with experts placed {after:.2f}"
        )
    if case.disturbed:
        lines.append(disturbance_warning(case.disturbed))
    return lines


def _lines(case: CaseSummary) -> list[list[str]]:
    """The headings and a line for each variant; without the optional columns in which no variant has anything."""
    headings = (heading.replace("quartiles", case.rows[0].speedup.ends) for heading in _HEADINGS)
    lines = [list(headings), *(_cells(row) for row in case.rows)]
    for heading, place in _OPTIONAL.items():
        column = [_optional_cells(row, case.sent_rows)[heading] for row in case.rows]
        if any(column):
            at = lines[0].index(place)
            for line, cell in zip(lines, [heading, *column], strict=True):
                line.insert(at, cell)
    return lines


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
