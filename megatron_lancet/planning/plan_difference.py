"""Lists the fields in which the plans of several ranks differ."""

import json
from collections.abc import Sequence
from typing import Any

from megatron_lancet.files.reader import differences
from megatron_lancet.schedule.ranges import name_ranks

_MAX_LISTED = 8


def plan_differences(plans: Sequence[str]) -> list[str]:
    """One text per field that differs between ranks, for example ``num_chunks is 2 on rank 0, 4 on rank 1``.

    Args:
        plans: JSON of each rank's plan, ``null`` for a rank without one; in rank order.
    """
    fields = [_fields(json.loads(plan)) for plan in plans]
    with_plan = [rank for rank, values in enumerate(fields) if values]
    without = [rank for rank, values in enumerate(fields) if not values]
    lines = []
    if with_plan and without:
        lines.append(f"{name_ranks(with_plan)}: overlap by a plan, {name_ranks(without)}: no plan")
    for name, values in differences(*(fields[rank] for rank in with_plan), absent="absent"):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, value in zip(with_plan, values, strict=True):
            ranks_by_value.setdefault(value, []).append(rank)
        lines.append(
            f"{name} is " + ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_by_value.items())
        )
    if len(lines) > _MAX_LISTED:
        lines[_MAX_LISTED:] = [f"{len(lines) - _MAX_LISTED} more fields differ"]
    return lines


def _fields(value: Any, path: str = "") -> dict[str, str]:
    """Scalars of a JSON value by their path: ``{"layers[0].window": "4"}``."""
    if isinstance(value, dict):
        parts = [(f"{path}.{name}" if path else name, part) for name, part in value.items()]
    elif isinstance(value, list):
        parts = [(f"{path}[{index}]", part) for index, part in enumerate(value)]
    else:
        return {path: str(value)} if path else {}
    return {name: text for part_path, part in parts for name, text in _fields(part, part_path).items()}
