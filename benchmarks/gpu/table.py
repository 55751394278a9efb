"""Medians of paired ratios, and the table that a reader sees."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MIN_ROUNDS = 2
"""Fewer have no quartiles."""


@dataclass
class Samples:
    """What was measured of one variant on one link.

    Attributes:
        step_ms: time of the step in each round; rounds of all variants have the same numbers.
        exposed_ms: of the communication of a step. On a GPU from rounds of their own, under the profiler.
        wire_ms: for which a message was on its way; empty where only waiting can be measured.
        idle_ms: for which the device had neither a kernel nor a message; empty likewise.
        peak_mb: highest memory in use next to what is there between steps; empty on a CPU.
        gradient_error: distance from the gradient in fp32, relative to its norm.
    """

    step_ms: dict[int, float] = field(default_factory=dict)
    exposed_ms: list[float] = field(default_factory=list)
    wire_ms: list[float] = field(default_factory=list)
    idle_ms: list[float] = field(default_factory=list)
    peak_mb: list[float] = field(default_factory=list)
    gradient_error: float = 0.0


@dataclass(frozen=True)
class Found:
    """All results of a measurement.

    Attributes:
        samples: by link, then by variant.
        skipped: variants without samples, and why.
    """

    samples: dict[str, dict[str, Samples]]
    skipped: dict[str, str]


def found_in(records: Sequence[Mapping[str, Any]]) -> Found:
    """Sorts the records of ``benchmarks.gpu.measure`` by link and variant.

    A variant with an error has failed, and all of its samples are left out.
    """
    samples: dict[str, dict[str, Samples]] = defaultdict(lambda: defaultdict(Samples))
    skipped: dict[str, str] = {}
    errors: dict[str, float] = {}
    for record in records:
        if "variant" not in record:
            continue
        name = record["variant"]
        if "skipped" in record or "error" in record:
            skipped[name] = record.get("skipped") or record["error"]
        elif record["name"] == "gradients":
            errors[name] = record["relative_error"]
        else:
            _add(samples[record["link"]][name], record)
    found: dict[str, dict[str, Samples]] = {}
    for link, by_variant in samples.items():
        kept = sorted({*by_variant} - {*skipped}, key=[*errors, *by_variant].index)  # steps come in random order
        found[link] = {name: replace(by_variant[name], gradient_error=errors.get(name, 0.0)) for name in kept}
    return Found(found, skipped)


def _add(samples: Samples, record: Mapping[str, Any]) -> None:
    if record["name"] == "step":
        samples.step_ms[record["round"]] = record["step_ms"]
    for figure in ("exposed_ms", "wire_ms", "idle_ms", "peak_mb"):
        if figure in record:
            getattr(samples, figure).append(record[figure])


@dataclass(frozen=True)
class Row:
    """One variant against the reference.

    Attributes:
        speedup: median over the rounds of the reference's step time over this one's.
        speedup_low: first quartile of the same.
        speedup_high: third quartile.
        exposed_ms: None where it was not measured.
        exposed_cut: share of the reference's exposed communication that is gone; None where that has none.
    """

    step_ms: float
    speedup: float
    speedup_low: float
    speedup_high: float
    exposed_ms: float | None
    exposed_cut: float | None
    wire_ms: float | None
    idle_ms: float | None
    peak_mb: float | None
    gradient_error: float


def summarise(samples: Mapping[str, Samples], reference: str) -> dict[str, Row]:
    """A row for each variant with at least two rounds in which the reference also ran.

    Args:
        reference: the variant to compare with.
    """
    base = samples[reference]
    base_exposed_ms = _median(base.exposed_ms)
    rows = {}
    for name, own in samples.items():
        ratios = [base.step_ms[at] / own.step_ms[at] for at in sorted({*base.step_ms} & {*own.step_ms})]
        if len(ratios) < MIN_ROUNDS:
            continue
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        exposed_ms = _median(own.exposed_ms)
        rows[name] = Row(
            step_ms=statistics.median(own.step_ms.values()),
            speedup=statistics.median(ratios),
            speedup_low=low,
            speedup_high=high,
            exposed_ms=exposed_ms,
            exposed_cut=1 - exposed_ms / base_exposed_ms if exposed_ms is not None and base_exposed_ms else None,
            wire_ms=_median(own.wire_ms),
            idle_ms=_median(own.idle_ms),
            peak_mb=_median(own.peak_mb),
            gradient_error=own.gradient_error,
        )
    return rows


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def table(rows: Mapping[str, Row], skipped: Mapping[str, str]) -> str:
    """Text with a line for each variant; those that could not run say why."""
    width = max(map(len, [*rows, *skipped, "variant"]))
    heads = ("step ms", "speed-up (quartiles)", "exposed ms", "cut", "wire ms", "idle ms", "peak MB", "grad error")
    lines = [f"{'variant':{width}}" + "".join(f"{head:>{cell}}" for head, cell in zip(heads, _WIDTHS, strict=True))]
    for name, row in rows.items():
        cells = (
            f"{row.step_ms:.2f}",
            f"{row.speedup:.3f} ({row.speedup_low:.3f}-{row.speedup_high:.3f})",
            _text(row.exposed_ms, ".2f"),
            _text(row.exposed_cut, ".0%"),
            _text(row.wire_ms, ".2f"),
            _text(row.idle_ms, ".2f"),
            _text(row.peak_mb, ".0f"),
            f"{row.gradient_error:.1e}",
        )
        lines.append(f"{name:{width}}" + "".join(f"{text:>{cell}}" for text, cell in zip(cells, _WIDTHS, strict=True)))
    lines += [f"{name:{width}}  skipped: {reason}" for name, reason in skipped.items()]
    return "\n".join(lines)


_WIDTHS = (10, 24, 12, 7, 10, 10, 10, 11)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
