"""Describes how a run's plan was found, for its closing report."""

from collections.abc import Mapping
from typing import Any

from megatron_lancet.files.reader import from_plain
from megatron_lancet.report.compared import Compared

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
        if figures is not None and not (name == "chosen" and figures == tuning["baseline"]):
            lines.append(
                f"  {title:<17}{figures['step_ms']:.1f} ms a step, {figures['exposed_ms']:.1f} ms of it exposed"
            )
    return [*lines, f"  {tuning['pay_off']}"] if tuning.get("pay_off") else lines


def speed_up(tuning: Mapping[str, Any]) -> str:
    """Returns the speed-up that tuning found, as a sentence without its full stop.

    Args:
        tuning: as for :func:`tuning_text`; ``compared`` with the measured steps, None without these; ``overlaps``,
            whether the plan that won overlaps anything; ``won_by``, its other differences from the plan without
            overlap, in words; ``has_kernel``, whether it has the attention kernel; ``kernel_gain``, of this kernel
            alone.
    """
    if tuning["compared"] is None:
        before = tuning["baseline"]
        found = f"; without overlap a step took {before['step_ms']:.0f} ms" if before is not None else ""
        return f"no plan was compared with no overlap in this run: tuning {tuning['how']}{found}"
    compared = from_plain(Compared, tuning["compared"], "report.json.tuning.compared")
    figures = compared.figures()
    if tuning["overlaps"]:
        alone = tuning["kernel_gain"]
        kernel = f"; the attention kernel alone gave {alone:.2f}x" if alone is not None and tuning["has_kernel"] else ""
        than = "faster than" if compared.gain >= 1 else "as fast as"
        return f"{compared.gain:.2f}x {than} without overlap on this machine ({figures}{kernel})"
    if tuning["won_by"]:
        won_by = tuning["won_by"]
        return f"{compared.gain:.2f}x faster on this machine by {won_by}; nothing is overlapped ({figures})"
    slower = "no plan was faster than without overlap on this machine by more than the noise"
    return (
        f"{slower} ({compared.no_overlap_ms:.0f} ms a step, exposed {100 * compared.no_overlap_share:.0f} %; measured "
        f"{compared.how}, n={compared.num_steps})"
    )
