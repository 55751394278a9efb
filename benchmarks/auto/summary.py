"""From the samples of a case to steady steps, ratios, and the time to a step with tuning included."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.auto.cases import AUTO, FIXED, SAME, USERS, VARIANTS
from benchmarks.gradient_error import relative_difference
from benchmarks.harness.samples import Spread, spread
from benchmarks.harness.tables import aligned, markdown

TRAINING_STEPS = 500
"""Steps of the training whose length, with tuning included, is told."""


@dataclass(frozen=True)
class VariantSummary:
    """A variant in a case.

    Attributes:
        step_ms: median of the steady steps.
        waited_share: part of it in which compute waits for all-to-alls.
        speedup: the reference's step over its own in the same turn.
        plan: under which it ended.
    """

    name: str
    step_ms: float
    waited_share: float
    speedup: Spread
    plan: str


@dataclass(frozen=True)
class CaseSummary:
    """A case.

    Attributes:
        variants: by name.
        num_tuning_steps: of ``auto``.
        to_best: ``auto``'s steady step over the fastest fixed plan's, median of paired ratios.
        to_best_error: standard error of that ratio, from its spread over turns: the machine's speed changes from one
            turn to the next, so steps of a turn are not independent. None with one turn.
        num_fixed: fixed plans that ran.
        time_to_step: see :func:`_time_to_step`.
        counts_planning: whether that time includes the work between the steps of the tuning; older results lack it.
        max_loss_difference: largest relative difference of a step's loss from the reference's.
        prediction_errors: predicted over measured step, less one, of each plan in ``auto``'s race that has both.
        disturbance: the sentence that marks a disturbed case; None for other cases.
        against_users: step of stock as a user has it over ``auto``'s; None if that did not run.
        to_same: ``auto``'s steady step over the step of the fixed plan that is ``auto``'s own; None if none is.
    """

    name: str
    share: float
    rate_bps: float
    micro_batches: int
    variants: Mapping[str, VariantSummary]
    num_tuning_steps: int
    best: str
    to_best: Spread
    to_best_error: float | None
    time_to_step: float
    max_loss_difference: float
    prediction_errors: Mapping[str, float]
    num_fixed: int
    counts_planning: bool
    disturbance: str | None
    against_users: Spread | None
    to_same: Spread | None

    @property
    def prediction_error(self) -> float | None:
        """Of the winner; None if it had no prediction."""
        return self.prediction_errors.get(self.variants[AUTO].plan)


def _steps(record: Mapping[str, Any], field: int) -> list[float]:
    return [step[field] for turn in record["samples"] for step in turn]


def _ratios(over: Mapping[str, Any], under: Mapping[str, Any]) -> Spread:
    return spread([a / b for a, b in zip(_steps(over, 0), _steps(under, 0), strict=True)])


def _error_over_turns(over: Mapping[str, Any], under: Mapping[str, Any]) -> float | None:
    turns = zip(over["samples"], under["samples"], strict=True)
    logs = [math.log(sum(step[0] for step in a) / sum(step[0] for step in b)) for a, b in turns]
    return statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None


def summarise(case: Mapping[str, Any]) -> CaseSummary:
    """The figures of a case of the result file."""
    records: Mapping[str, Any] = case["variants"]
    reference, auto = records[SAME], records[AUTO]
    variants = {
        name: VariantSummary(
            name,
            statistics.median(_steps(record, 0)),
            statistics.median(_steps(record, 1)) / statistics.median(_steps(record, 0)),
            _ratios(reference, record),
            record["plan"],
        )
        for name, record in records.items()
    }
    fixed = [name for name in records if name in FIXED]
    best = min(fixed, key=lambda name: variants[name].step_ms)
    to_best = _ratios(auto, records[best])
    return CaseSummary(
        case["name"],
        case["share"],
        case["rate_bps"],
        case["micro_batches"],
        variants,
        len(_tuning_ms(auto)),
        best,
        to_best,
        _error_over_turns(auto, records[best]),
        _time_to_step(case, best, to_best.median),
        max(largest_difference(reference["losses"], record["losses"]) for record in records.values()),
        _prediction_errors(auto["lines"]),
        len(fixed),
        _WHOLE in auto,
        disturbance_text(case),
        _ratios(records[USERS], auto) if USERS in records else None,
        next((_ratios(auto, records[name]) for name in fixed if _order(records[name]) == _order(auto)), None),
    )


def _order(record: Mapping[str, Any]) -> str:
    """A plan without its attention kernel, which fixed plans have by a flag."""
    return str(record["plan"]).replace(" attention=fused", "")


def disturbance_text(case: Mapping[str, Any]) -> str | None:
    """The sentence that marks a case which something disturbed; None for others."""
    if not case.get("disturbance", {}).get("is_disturbed"):
        return None
    return "DISTURBED: other work took the processor or memory; quote these figures only with this mark."


_WHOLE = "whole_tuning_ms"


def _tuning_ms(auto: Mapping[str, Any]) -> Sequence[float]:
    found: Sequence[float] = auto[_WHOLE] if _WHOLE in auto else auto["tuning_ms"]
    return found


def _time_to_step(case: Mapping[str, Any], best: str, to_best: float) -> float:
    """Time of the first 500 steps with the fastest plan, over their time with ``auto`` and its tuning.

    Both are counted in steps of the fastest fixed plan, because the machine's speed drifts: a segment of the tuning is
    divided by the mean step of that plan in the turns before and after the segment. Older results have no such turns;
    there the plan's steady step is the divisor.

    Args:
        case: of the result file.
        best: the fastest fixed plan.
        to_best: steady step of ``auto`` over that plan's.
    """
    tuning_ms, record = _tuning_ms(case["variants"][AUTO]), case["variants"][best]
    turns = record.get("beside_ms") or [[statistics.median(_steps(record, 0))]] * 2
    num_steps = case.get("segment_steps", len(tuning_ms))
    in_steps = 0.0
    for index, start in enumerate(range(0, len(tuning_ms), num_steps)):
        in_steps += sum(tuning_ms[start : start + num_steps]) / statistics.mean(turns[index] + turns[index + 1])
    in_steps += (TRAINING_STEPS - len(tuning_ms)) * to_best
    return TRAINING_STEPS * min(1, to_best) / in_steps


_PREDICTED = re.compile(r"((?:chunks=|layers ).*?), predicted ([\d.]+) ms a step")
_OUT = re.compile(r"((?:chunks=|layers ).*) \(([\d.]+) ms\)")
_WON = re.compile(r"\(((?:chunks=|layers ).*)\): measured ([\d.]+) ms")
"""Plans and steps in the lines about a race, which ``features/tuning/controller.py`` and ``race.py`` write."""


def _prediction_errors(lines: Sequence[str]) -> dict[str, float]:
    predicted = {plan: float(ms) for line in lines if ": measuring " in line for plan, ms in _PREDICTED.findall(line)}
    measured: dict[str, float] = {}
    for line in lines:
        if ": out after " in line:
            slower = line.partition("turn")[2].partition(": ")[2].rpartition("; ")[0]
            parts = re.split(r"(?<= ms\)), ", slower)
            measured |= {found[1]: float(found[2]) for part in parts if (found := _OUT.fullmatch(part))}
        elif won := _WON.search(line):
            measured[won[1]] = float(won[2])
    return {plan: predicted[plan] / ms - 1 for plan, ms in measured.items() if plan in predicted}


def largest_difference(reference: Sequence[float], losses: Sequence[float]) -> float:
    """Largest difference of a step's loss, relative to the reference's, over the steps that both have done."""
    both = min(len(reference), len(losses))
    return relative_difference(losses[:both], reference[:both])


_HEADINGS = ("variant", "step", "speed-up (quartiles)", "waits", "plan")


def _lines(case: CaseSummary) -> list[list[str]]:
    lines = [list(_HEADINGS)]
    for name, found in case.variants.items():
        ratio = f"{found.speedup.median:.2f} ({found.speedup.low:.2f}-{found.speedup.high:.2f})"
        meaning = VARIANTS[name].meaning
        lines.append([f"{name}: {meaning}", f"{found.step_ms:.0f} ms", ratio, f"{found.waited_share:.0%}", found.plan])
    return lines


def _about(case: CaseSummary) -> str:
    to_best = f"{case.to_best.median:.3f} ({case.to_best.low:.3f}-{case.to_best.high:.3f})"
    return (
        f"{case.name}: {case.micro_batches} micro-batches, {case.rate_bps / 1e6:.0f} Mbit/s, set so that stock waits "
        f"for {case.share:.0%}. auto chose after {case.num_tuning_steps} steps; its step is {to_best} of the fastest's "
        f"of {case.num_fixed} fixed plans ({case.best}). Tuning included, its training of {TRAINING_STEPS} steps runs "
        f"at {case.time_to_step:.0%} of the speed of the fastest plan from the first step. Largest relative difference "
        f"of a loss: {case.max_loss_difference:.1e}.{'' if case.disturbance is None else f' {case.disturbance}'}"
    )


def as_text(cases: Sequence[CaseSummary]) -> str:
    """Tables for a terminal."""
    return "\n\n".join(f"{_about(case)}\n{aligned(_lines(case))}" for case in cases)


def as_markdown(cases: Sequence[CaseSummary]) -> str:
    """Tables of markdown."""
    return "\n\n".join(f"{_about(case)}\n\n{markdown(_lines(case))}" for case in cases) + "\n"
