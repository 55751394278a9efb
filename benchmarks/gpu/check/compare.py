"""Predicted next to measured: the step of each variant on each link, and the share of communication that it hides.

No torch. The hidden share is (stock - variant) / (stock - ideal) in step times: 1 where a variant is as fast as stock
with a free link, 0 where it is as fast as stock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STOCK, IDEAL = "stock", "ideal"
WAYS = ("modelled", "simulated")
"""How a figure was predicted: a virtual GPU's log, played on a model of the device, and the planner's simulator."""
_FIGURES = ("step_ms", "exposed_ms")


@dataclass(frozen=True)
class Compared:
    """A figure, predicted and measured.

    Attributes:
        measured: None where it was not measured.
        predicted: by each of :data:`WAYS` that has it.
    """

    measured: float | None
    predicted: Mapping[str, float]

    def error(self, way: str) -> float | None:
        """Predicted over measured, minus 1; None where one of them is missing, or nothing was measured but 0."""
        if not self.measured or way not in self.predicted:
            return None
        return self.predicted[way] / self.measured - 1


@dataclass(frozen=True)
class ComparedRow:
    """A variant on a link.

    Attributes:
        hidden: share of stock's communication that the variant hides.
    """

    link: str
    variant: str
    step_ms: Compared
    exposed_ms: Compared
    hidden: Compared


def rows(prediction: Mapping[str, Any], measured: Mapping[str, Mapping[str, Any]]) -> list[ComparedRow]:
    """A row for each link and variant that is predicted or measured, by link, in the order of the prediction.

    Args:
        prediction: as the file has it.
        measured: ``step_ms`` and ``exposed_ms`` by variant and link; either may be missing or None.
    """
    predicted: Mapping[str, Mapping[str, Any]] = prediction["variants"]
    links = dict.fromkeys(link for found in (predicted, measured) for by_link in found.values() for link in by_link)
    names = dict.fromkeys([*predicted, *measured])
    return [
        _row(link, name, predicted, measured)
        for link in links
        for name in names
        if link in predicted.get(name, {}) or link in measured.get(name, {})
    ]


def _row(
    link: str, name: str, predicted: Mapping[str, Mapping[str, Any]], measured: Mapping[str, Mapping[str, Any]]
) -> ComparedRow:
    step, exposed = (
        Compared(
            measured.get(name, {}).get(link, {}).get(figure),
            {
                way: one[figure]
                for way, one in predicted.get(name, {}).get(link, {}).items()
                if way in WAYS and one.get(figure) is not None
            },
        )
        for figure in _FIGURES
    )
    by_way = {way: _hidden(_steps(predicted, link, way), name) for way in WAYS}
    hidden = Compared(
        _hidden(_steps(measured, link, None), name), {way: one for way, one in by_way.items() if one is not None}
    )
    return ComparedRow(link, name, step, exposed, hidden)


def _steps(found: Mapping[str, Mapping[str, Any]], link: str, way: str | None) -> dict[str, float]:
    """Step times by variant, predicted or measured."""
    steps = {}
    for name, by_link in found.items():
        figures = by_link.get(link, {})
        figures = figures if way is None else figures.get(way, {})
        if figures.get("step_ms") is not None:
            steps[name] = figures["step_ms"]
    return steps


def _hidden(steps: Mapping[str, float], name: str) -> float | None:
    if name in (STOCK, IDEAL) or not {name, STOCK, IDEAL} <= set(steps):
        return None
    to_hide = steps[STOCK] - steps[IDEAL]
    return (steps[STOCK] - steps[name]) / to_hide if to_hide > 0 else None


def table(prediction: Mapping[str, Any], measured: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table of :func:`rows`: errors in per cent of what was measured, hidden shares in per cent."""
    head = ["link", "variant"]
    for figure in ("step ms", "exposed ms", "hidden"):
        head += [f"{figure} measured", *WAYS]
    lines = [_line(head), _line(["---", "---", *["---:"] * (len(head) - 2)])]
    for row in rows(prediction, measured):
        cells = [row.link, row.variant, *_times(row.step_ms), *_times(row.exposed_ms), *_shares(row.hidden)]
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _times(one: Compared) -> list[str]:
    cells = ["" if one.measured is None else f"{one.measured:.1f}"]
    for way in WAYS:
        error = one.error(way)
        note = "" if error is None else f" ({100 * error:+.0f} %)"
        cells.append(f"{one.predicted[way]:.1f}{note}" if way in one.predicted else "")
    return cells


def _shares(one: Compared) -> list[str]:
    shares = [one.measured, *(one.predicted.get(way) for way in WAYS)]
    return ["" if share is None else f"{100 * share:.0f} %" for share in shares]
