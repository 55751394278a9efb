"""Medians of paired ratios, and the table that a reader sees."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Samples:
    """What was measured of one variant; entry i of all variants' ``step_ms`` comes from the same round.

    Attributes:
        exposed_ms: of the communication of a step. On a GPU from rounds of their own, under the profiler.
        wire_ms: for which a message was on its way; empty where only waiting can be measured.
        peak_mb: highest memory in use beside what is there between steps; empty on a CPU.
        gradient_error: distance from the gradient in fp32, relative to its norm.
    """

    step_ms: list[float] = field(default_factory=list)
    exposed_ms: list[float] = field(default_factory=list)
    wire_ms: list[float] = field(default_factory=list)
    peak_mb: list[float] = field(default_factory=list)
    gradient_error: float = 0.0


@dataclass(frozen=True)
class Row:
    """One variant against the reference.

    Attributes:
        speedup: median over the rounds of the reference's step time over this one's.
        speedup_low: first quartile of the same.
        speedup_high: third quartile.
        exposed_cut: share of the reference's exposed communication that is gone; None where that has none.
    """

    step_ms: float
    speedup: float
    speedup_low: float
    speedup_high: float
    exposed_ms: float
    exposed_cut: float | None
    wire_ms: float | None
    peak_mb: float | None
    gradient_error: float


def summarise(samples: Mapping[str, Samples], reference: str) -> dict[str, Row]:
    """A row for each variant.

    Args:
        samples: at least two rounds of each.
        reference: the variant to compare with.
    """
    base = samples[reference]
    base_exposed_ms = statistics.median(base.exposed_ms)
    rows = {}
    for name, own in samples.items():
        ratios = [theirs / ours for theirs, ours in zip(base.step_ms, own.step_ms, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        exposed_ms = statistics.median(own.exposed_ms)
        rows[name] = Row(
            step_ms=statistics.median(own.step_ms),
            speedup=statistics.median(ratios),
            speedup_low=low,
            speedup_high=high,
            exposed_ms=exposed_ms,
            exposed_cut=1 - exposed_ms / base_exposed_ms if base_exposed_ms > 0 else None,
            wire_ms=_median(own.wire_ms),
            peak_mb=_median(own.peak_mb),
            gradient_error=own.gradient_error,
        )
    return rows


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def table(rows: Mapping[str, Row], skipped: Mapping[str, str]) -> str:
    """Text with a line for each variant; those that could not run say why."""
    width = max(map(len, [*rows, *skipped, "variant"]))
    heads = ("step ms", "speed-up (quartiles)", "exposed ms", "cut", "wire ms", "peak MB", "grad error")
    lines = [f"{'variant':{width}}" + "".join(f"{head:>{cell}}" for head, cell in zip(heads, _WIDTHS, strict=True))]
    for name, row in rows.items():
        cells = (
            f"{row.step_ms:.2f}",
            f"{row.speedup:.3f} ({row.speedup_low:.3f}-{row.speedup_high:.3f})",
            f"{row.exposed_ms:.2f}",
            "-" if row.exposed_cut is None else f"{row.exposed_cut:.0%}",
            "-" if row.wire_ms is None else f"{row.wire_ms:.2f}",
            "-" if row.peak_mb is None else f"{row.peak_mb:.0f}",
            f"{row.gradient_error:.1e}",
        )
        lines.append(f"{name:{width}}" + "".join(f"{text:>{cell}}" for text, cell in zip(cells, _WIDTHS, strict=True)))
    lines += [f"{name:{width}}  skipped: {reason}" for name, reason in skipped.items()]
    return "\n".join(lines)


_WIDTHS = (10, 24, 12, 7, 10, 10, 11)
