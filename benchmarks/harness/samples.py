"""From the samples of a result file to medians, quartiles and paired ratios. Plain Python."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Ranks = Sequence[Mapping[str, float]]
"""One step of one variant: a sample per rank."""


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles; of few values their range.

    Attributes:
        ends: what ``low`` and ``high`` are.
    """

    median: float
    low: float
    high: float
    ends: str = field(default="quartiles", compare=False)


def ends_of(number: int) -> str:
    """What the ends of a spread of ``number`` values are."""
    return "quartiles" if number >= 4 else "range"


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles; with fewer than four values the smallest and the largest instead."""
    if (ends := ends_of(len(values))) == "range":
        return Spread(statistics.median(values), min(values), max(values), ends)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def slower(field: str) -> Callable[[Ranks], float]:
    """The larger value of the ranks."""
    return lambda ranks: max(rank[field] for rank in ranks)


def mean(*fields: str) -> Callable[[Ranks], float]:
    """Mean over the ranks of the sum of ``fields``."""
    return lambda ranks: statistics.mean(sum(rank[field] for field in fields) for rank in ranks)


payload_exposed = mean("exposed_forward_ms", "exposed_backward_ms")
all_exposed = mean("exposed_forward_ms", "exposed_backward_ms", "counts_ms")


def by_rank(fields: Sequence[str], samples: Sequence[Sequence[Sequence[float]]]) -> list[Ranks]:
    """The samples of a variant, steps of ranks of values, with the values' names."""
    return [[dict(zip(fields, rank, strict=True)) for rank in ranks] for ranks in samples]


def by_node[Of](ranks: Sequence[Of], ranks_per_node: int) -> list[Sequence[Of]]:
    """What belongs to the ranks, node by node."""
    return [ranks[start : start + ranks_per_node] for start in range(0, len(ranks), ranks_per_node)]


class CaseSamples:
    """A case's samples by variant; samples of one repeat belong together."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        names = case["sample_fields"]
        self.sweeps: list[dict[str, list[Ranks]]] = [
            {variant: by_rank(names, repeats) for variant, repeats in sweep["samples"].items()}
            for sweep in case["sweeps"]
        ]

    def all(self, variant: str) -> list[Ranks]:
        """Of all sweeps."""
        return [ranks for sweep in self.sweeps for ranks in sweep[variant]]

    def median(self, variant: str, value: Callable[[Ranks], float]) -> float:
        """Of ``value`` over all steps."""
        return statistics.median(value(ranks) for ranks in self.all(variant))

    def speedups(self, variant: str, reference: str) -> list[list[float]]:
        """Per sweep, the reference's step time over the variant's in the same repeat."""
        step = slower("step_ms")
        return [
            [step(a) / step(b) for a, b in zip(sweep[reference], sweep[variant], strict=True)] for sweep in self.sweeps
        ]


def disturbed_sweeps(case: Mapping[str, Any]) -> list[int]:
    """Numbers of the sweeps that something disturbed, from 1."""
    return [number for number, sweep in enumerate(case["sweeps"], 1) if sweep["disturbance"]["is_disturbed"]]


def disturbance_warning(sweeps: Sequence[int]) -> str:
    """The sentence that marks figures of disturbed sweeps."""
    which = ", ".join(map(str, sweeps))
    cause = f"other work took the processor or memory during sweep {which}"
    return f"DISTURBED: {cause}; quote these figures only with this mark"
