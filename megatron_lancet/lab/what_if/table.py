"""Formats forecasts over layouts as text, Markdown and JSON."""

from collections.abc import Sequence, Set
from typing import Any

from megatron_lancet.lab.what_if.forecast import SweepRow
from megatron_lancet.report.tables import right_aligned
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.plan import Dispatch

_LAYOUT_COLUMNS = ["ranks", "nodes", "EP", "PP", "gradients ms", "bubble"]
_IMPOSSIBLE = "-"
_FORECAST_FIELDS = ("step_ms", "exposed_ms", "exposed_share", "bubble_ms", "gradient_ms", "peak_bytes")


def _cells(row: SweepRow, with_dispatch: Set[str]) -> list[str]:
    first = next(iter(row.forecasts.values()))
    layout = row.layout
    texts = [str(layout.world_size), str(row.num_nodes), str(layout.ep_size), str(layout.pp_size)]
    texts += [_ms(first.gradient_ms), f"{100 * first.bubble_ms / first.step_ms if first.step_ms else 0:.0f} %"]
    for name, forecast in row.forecasts.items():
        texts += [_ms(forecast.step_ms), f"{100 * forecast.exposed_share:.1f} %"]
        texts += [str(forecast.plan.dispatch)] if name in with_dispatch else []
    if row.by_dispatch:
        possible = {dispatch: _ms(forecast.step_ms) for dispatch, forecast in row.by_dispatch.items()}
        texts += [possible.get(dispatch, _IMPOSSIBLE) for dispatch in Dispatch]
    return texts


def as_text(rows: Sequence[SweepRow]) -> str:
    """Returns a table with columns aligned to the right."""
    return "\n".join(right_aligned(_table(rows)))


def as_markdown(rows: Sequence[SweepRow]) -> str:
    """Returns a Markdown table."""
    head, *lines = _table(rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---:"] * len(head), *lines])


def as_plain(rows: Sequence[SweepRow]) -> list[dict[str, Any]]:
    """Returns the forecasts for ``json.dumps``."""
    return [
        {
            "world_size": row.layout.world_size,
            "num_nodes": row.num_nodes,
            "ep_size": row.layout.ep_size,
            "pp_size": row.layout.pp_size,
            "num_micro_batches": row.layout.num_micro_batches,
            "largest_received_share": max(row.layout.received_share),
            "variants": {
                name: {**{field: getattr(forecast, field) for field in _FORECAST_FIELDS}, "plan": str(forecast.plan)}
                for name, forecast in row.forecasts.items()
            },
            **_by_dispatch(row),
        }
        for row in rows
    ]


def _by_dispatch(row: SweepRow) -> dict[str, Any]:
    if not row.by_dispatch:
        return {}
    return {
        "by_dispatch": {
            str(dispatch): {"step_ms": forecast.step_ms, "plan": str(forecast.plan)}
            for dispatch, forecast in row.by_dispatch.items()
        }
    }


def _table(rows: Sequence[SweepRow]) -> list[list[str]]:
    assert rows
    # What all-to-alls carry has a column where it is not the same in all layouts, or not as in stock.
    with_dispatch = {
        name for row in rows for name, one in row.forecasts.items() if one.plan.dispatch is not Dispatch.PLAIN
    }
    titles = [
        f"{name}: {what}"
        for name in rows[0].forecasts
        for what in ("step ms", "exposed", *([OpKind.DISPATCH] if name in with_dispatch else []))
    ]
    if rows[0].by_dispatch:
        titles += [f"{dispatch}: step ms" for dispatch in Dispatch]
    return [_LAYOUT_COLUMNS + titles, *(_cells(row, with_dispatch) for row in rows)]


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"
