"""Forecasts over layouts as text, Markdown and JSON."""

from collections.abc import Sequence
from typing import Any

from megatron_lancet.planning.what_if.forecast import SweepRow


def header(variants: Sequence[str]) -> list[str]:
    """Titles of the columns."""
    layout = ["ranks", "nodes", "EP", "PP", "gradients ms", "bubble"]
    return layout + [f"{name}: {what}" for name in variants for what in ("step ms", "exposed")]


def cells(row: SweepRow) -> list[str]:
    """One line of the table."""
    first = next(iter(row.forecasts.values()))
    layout = row.layout
    texts = [str(layout.world_size), str(row.num_nodes), str(layout.ep_size), str(layout.pp_size)]
    texts += [_ms(first.gradient_ms), f"{100 * first.bubble_ms / first.step_ms if first.step_ms else 0:.0f} %"]
    for forecast in row.forecasts.values():
        texts += [_ms(forecast.step_ms), f"{100 * forecast.exposed_share:.1f} %"]
    return texts


def as_text(rows: Sequence[SweepRow]) -> str:
    """Columns aligned to the right."""
    table = _table(rows)
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in table)


def as_markdown(rows: Sequence[SweepRow]) -> str:
    """A Markdown table."""
    head, *lines = _table(rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---:"] * len(head), *lines])


def as_plain(rows: Sequence[SweepRow]) -> list[dict[str, Any]]:
    """What ``json.dumps`` takes."""
    return [
        {
            "world_size": row.layout.world_size,
            "num_nodes": row.num_nodes,
            "ep_size": row.layout.ep_size,
            "pp_size": row.layout.pp_size,
            "num_micro_batches": row.layout.num_micro_batches,
            "largest_received_share": max(row.layout.received_share),
            "variants": {
                name: {
                    "step_ms": forecast.step_ms,
                    "exposed_ms": forecast.exposed_ms,
                    "exposed_share": forecast.exposed_share,
                    "bubble_ms": forecast.bubble_ms,
                    "gradient_ms": forecast.gradient_ms,
                    "peak_bytes": forecast.peak_bytes,
                    "plan": str(forecast.plan),
                }
                for name, forecast in row.forecasts.items()
            },
        }
        for row in rows
    ]


def _table(rows: Sequence[SweepRow]) -> list[list[str]]:
    assert rows
    return [header(list(rows[0].forecasts)), *(cells(row) for row in rows)]


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"
