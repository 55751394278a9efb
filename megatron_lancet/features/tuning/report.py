"""Describes how a run's plan was found, for its closing report."""

from collections.abc import Mapping
from typing import Any

_NAMES = {"baseline": "without overlap", "predicted": "predicted", "chosen": "when chosen"}


def tuning_text(tuning: Mapping[str, Any]) -> list[str]:
    """Returns the lines of the report.

    Args:
        tuning: ``stage`` that the run reached, ``how`` the plan was found, ``num_plans`` that were made; ``baseline``,
            ``predicted`` and ``chosen`` with ``step_ms`` and ``exposed_ms``, each None if unknown.
    """
    again = f", planned {tuning['num_plans']} times" if tuning["num_plans"] > 1 else ""
    lines = [f"tuning             {tuning['how']}{again}"]
    for name, title in _NAMES.items():
        figures = tuning[name]
        if figures is not None:
            lines.append(
                f"  {title:<17}{figures['step_ms']:.1f} ms a step, {figures['exposed_ms']:.1f} ms of it exposed"
            )
    return lines
