"""The speed-up by the plan in each loop, and how the loops compare."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.bridge.variants import BRIDGE_PLAN, BRIDGE_STOCK, MEANING, PLAN, STOCK
from benchmarks.harness.samples import Spread, spread
from benchmarks.harness.tables import aligned, markdown


@dataclass(frozen=True)
class BridgeSummary:
    """A case.

    Attributes:
        step_ms: median step by variant.
        speedup: stock's step over the plan's in the same turn, in Megatron's own loop.
        bridge_speedup: the same in Bridge's.
        to_megatron: the plan's step in Bridge's loop over the same in Megatron's.
        stock_to_megatron: the same of stock's steps.
    """

    name: str
    rate_bps: float
    step_ms: Mapping[str, float]
    speedup: Spread
    bridge_speedup: Spread
    to_megatron: Spread
    stock_to_megatron: Spread

    @property
    def difference(self) -> float:
        """Relative difference between the speed-up in Bridge's loop and the speed-up in Megatron's."""
        return self.bridge_speedup.median / self.speedup.median - 1


def _steps(record: Mapping[str, Any]) -> list[float]:
    return [step[0] for turn in record["samples"] for step in turn]


def summarise(case: Mapping[str, Any]) -> BridgeSummary:
    """The figures of a case of the result file."""
    steps = {name: _steps(record) for name, record in case["variants"].items()}

    def ratio(over: str, under: str) -> Spread:
        return spread([a / b for a, b in zip(steps[over], steps[under], strict=True)])

    return BridgeSummary(
        case["name"],
        case["rate_bps"],
        {name: statistics.median(times) for name, times in steps.items()},
        ratio(STOCK, PLAN),
        ratio(BRIDGE_STOCK, BRIDGE_PLAN),
        ratio(BRIDGE_PLAN, PLAN),
        ratio(BRIDGE_STOCK, STOCK),
    )


def _lines(case: BridgeSummary) -> list[list[str]]:
    return [["training", "step"], *([MEANING[name], f"{step_ms:.0f} ms"] for name, step_ms in case.step_ms.items())]


def about(case: BridgeSummary) -> str:
    """The figures in a paragraph."""
    return (
        f"{case.name}, {case.rate_bps / 1e6:.0f} Mbit/s: the plan is {_text(case.speedup)} times as fast as stock in "
        f"Megatron's loop and {_text(case.bridge_speedup)} times in Bridge's, a difference of {case.difference:+.1%}. "
        f"A step of the plan in Bridge's loop takes {_text(case.to_megatron)} of the time in Megatron's, a step of "
        f"stock {_text(case.stock_to_megatron)}."
    )


def _text(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def as_text(cases: Sequence[BridgeSummary]) -> str:
    """Tables for a terminal."""
    return "\n\n".join(f"{about(case)}\n{aligned(_lines(case))}" for case in cases)


def as_markdown(cases: Sequence[BridgeSummary]) -> str:
    """Tables of markdown."""
    return "\n\n".join(f"{about(case)}\n\n{markdown(_lines(case))}" for case in cases) + "\n"
