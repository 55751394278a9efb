"""Says in which fields the plans of several ranks differ."""

import json
from collections.abc import Sequence
from typing import Any

_MAX_LISTED = 8
_ABSENT = "absent"


def plan_differences(plans: Sequence[str]) -> list[str]:
    """One sentence per field that is not the same on all ranks, for example ``num_chunks is 2 on rank 0, 4 on rank 1``.

    Args:
        plans: JSON of each rank's plan, ``null`` for a rank without one; in rank order.
    """
    fields = [_fields(json.loads(plan)) for plan in plans]
    with_plan = [rank for rank, values in enumerate(fields) if values]
    without = [rank for rank, values in enumerate(fields) if not values]
    differences = []
    if with_plan and without:
        differences.append(f"{_ranks(with_plan)}: overlap by a plan, {_ranks(without)}: no plan")
    for name in dict.fromkeys(name for values in fields for name in values):
        ranks_by_value: dict[str, list[int]] = {}
        for rank in with_plan:
            ranks_by_value.setdefault(fields[rank].get(name, _ABSENT), []).append(rank)
        if len(ranks_by_value) > 1:
            differences.append(
                f"{name} is " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items())
            )
    if len(differences) > _MAX_LISTED:
        differences[_MAX_LISTED:] = [f"{len(differences) - _MAX_LISTED} more fields differ"]
    return differences


def _fields(value: Any, path: str = "") -> dict[str, str]:
    """Leaves of a JSON value by their path: ``{"layers[0].window": "4"}``."""
    if isinstance(value, dict):
        parts = [(f"{path}.{name}" if path else name, part) for name, part in value.items()]
    elif isinstance(value, list):
        parts = [(f"{path}[{index}]", part) for index, part in enumerate(value)]
    else:
        return {path: str(value)} if path else {}
    return {name: text for part_path, part in parts for name, text in _fields(part, part_path).items()}


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
