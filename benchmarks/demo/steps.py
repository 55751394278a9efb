"""What the demo learns of each step, and what it says about all of them."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.samples import Spread, spread
from megatron_lancet.files.reader import from_plain
from megatron_lancet.schedule.timeline import RankTimeline

STOCK, OURS = "stock", "ours"


@dataclass(frozen=True)
class RankStep:
    """A training step on a rank.

    Attributes:
        step: number of the step, from 1.
        loss: LM loss in nats per token, mean over the global batch; the same on all ranks.
        step_ms: wall clock time of forward, backward, gradient reduction and optimizer.
        whole_ms: the same with work of features before or after it; 0 in older records.
        waited_ms: part of it in which compute waited for all-to-alls and their token counts.
        reduced_ms: part of it in which compute waited for gradient reductions.
        sent_bytes: bytes that all-to-alls sent to the other rank.
        num_tokens: tokens of all ranks.
        timeline: of this step; None if it was not traced.
        plan: under which the next step runs, as text; ``stock`` for Megatron's modules.
        is_settled: whether the run has its final plan.
    """

    step: int
    loss: float
    step_ms: float
    waited_ms: float
    reduced_ms: float
    sent_bytes: int
    num_tokens: int
    timeline: RankTimeline | None = None
    plan: str = "stock"
    is_settled: bool = True
    whole_ms: float = 0.0

    @staticmethod
    def parse(line: str) -> "RankStep":
        """A line that a rank wrote."""
        return from_plain(RankStep, json.loads(line), "a rank's record")


@dataclass(frozen=True)
class Step:
    """A training step of all ranks; ``ranks`` in their order."""

    ranks: Sequence[RankStep]

    @property
    def loss(self) -> float:
        """LM loss in nats per token."""
        return self.ranks[0].loss

    @property
    def step_ms(self) -> float:
        """Of the slowest rank."""
        return max(rank.step_ms for rank in self.ranks)

    @property
    def whole_ms(self) -> float:
        """Of the slowest rank."""
        return max(rank.whole_ms for rank in self.ranks)

    @property
    def waited_ms(self) -> float:
        """Mean of the ranks."""
        return statistics.fmean(rank.waited_ms for rank in self.ranks)

    @property
    def reduced_ms(self) -> float:
        """Mean of the ranks."""
        return statistics.fmean(rank.reduced_ms for rank in self.ranks)

    @property
    def sent_bytes(self) -> int:
        """Of the rank that sent most."""
        return max(rank.sent_bytes for rank in self.ranks)


@dataclass(frozen=True)
class Medians:
    """Medians over steps."""

    step_ms: float
    waited_ms: float
    reduced_ms: float

    @property
    def waited_share(self) -> float:
        """Part of a step in which compute waits."""
        return self.waited_ms / self.step_ms


def medians(steps: Sequence[Step]) -> Medians:
    """Medians of at least one step."""
    return Medians(
        statistics.median(step.step_ms for step in steps),
        statistics.median(step.waited_ms for step in steps),
        statistics.median(step.reduced_ms for step in steps),
    )


class Comparison:
    """The steps of both variants, by number.

    Attributes:
        steps: of each variant.
    """

    def __init__(self, unmeasured: Sequence[int]) -> None:
        """
        Args:
            unmeasured: steps whose times don't count: warm-up, and those before the link had its rate.
        """
        self.steps: dict[str, dict[int, Step]] = {STOCK: {}, OURS: {}}
        self._unmeasured = frozenset(unmeasured)

    def add(self, variant: str, number: int, step: Step) -> None:
        """Takes in a step."""
        self.steps[variant][number] = step

    @property
    def measured_numbers(self) -> list[int]:
        """The steps whose times count, of those that both variants have done; all of those if none counts."""
        both = sorted(self.steps[STOCK].keys() & self.steps[OURS].keys())
        return [number for number in both if number not in self._unmeasured] or both

    def measured(self, variant: str) -> list[Step]:
        """A variant's steps of :attr:`measured_numbers`."""
        return [self.steps[variant][number] for number in self.measured_numbers]

    @property
    def speedup(self) -> Spread:
        """Stock's step time over ours for the step with the same number, in the turn before or after."""
        pairs = zip(self.measured(STOCK), self.measured(OURS), strict=True)
        return spread([stock.step_ms / ours.step_ms for stock, ours in pairs])

    @property
    def max_loss_difference(self) -> float:
        """Largest relative difference of a step's loss between the variants, over all steps of both; inf for nan."""
        pairs = [
            (step.loss, self.steps[OURS][number].loss)
            for number, step in self.steps[STOCK].items()
            if number in self.steps[OURS]
        ]
        differences = [abs(ours - stock) / abs(stock) for stock, ours in pairs]
        return max(difference if math.isfinite(difference) else math.inf for difference in differences)

    def typical(self, variant: str) -> RankTimeline | None:
        """Rank 0's timeline of the traced step that is closest to the median; None if no step was traced."""
        found = self.measured(variant)
        median_ms = medians(found).step_ms
        traced = [step for step in found if step.ranks[0].timeline is not None]
        if not traced:
            return None
        return min(traced, key=lambda step: abs(step.step_ms - median_ms)).ranks[0].timeline

    def summary(self) -> dict[str, Any]:
        """For summary.json.

        Returns:
            ``step_ms``, ``exposed_ms``, ``reduced_ms`` and ``tokens_per_s`` of ours, ``stock_step_ms``,
            ``stock_exposed_ms`` and ``stock_reduced_ms``, all medians of the same ``num_measured_steps``; ``speedup``,
            the median of the pairs' ratios, and its ``speedup_quartiles``; ``max_loss_difference``, relative. The
            raw data: ``measured_steps``, numbers from 1, and the ``samples`` of all steps, ranks and
            ``sample_fields``.
        """
        ours, stock = (medians(self.measured(variant)) for variant in (OURS, STOCK))
        num_tokens, speedup = self.measured(OURS)[0].ranks[0].num_tokens, self.speedup
        return {
            "tokens_per_s": num_tokens / ours.step_ms * 1e3,
            "step_ms": ours.step_ms,
            "exposed_ms": ours.waited_ms,
            "reduced_ms": ours.reduced_ms,
            "stock_step_ms": stock.step_ms,
            "stock_exposed_ms": stock.waited_ms,
            "stock_reduced_ms": stock.reduced_ms,
            "speedup": speedup.median,
            "speedup_quartiles": [speedup.low, speedup.high],
            "max_loss_difference": self.max_loss_difference,
            "num_measured_steps": len(self.measured_numbers),
            "measured_steps": self.measured_numbers,
            "sample_fields": list(SAMPLE_FIELDS),
            "samples": {variant: [_sample(step) for step in steps.values()] for variant, steps in self.steps.items()},
        }

    @staticmethod
    def read(summary: Mapping[str, Any]) -> "Comparison":
        """Returns the steps of a :meth:`summary`, without timelines."""
        counted, all_steps = set(summary["measured_steps"]), range(1, summary["iterations"] + 1)
        found = Comparison([number for number in all_steps if number not in counted])
        for variant, steps in summary["samples"].items():
            for number, ranks in enumerate(steps, start=1):
                named = [dict(zip(summary["sample_fields"], rank, strict=True)) for rank in ranks]
                found.add(variant, number, Step([RankStep(step=number, **values) for values in named]))
        return found


SAMPLE_FIELDS = ("loss", "step_ms", "waited_ms", "reduced_ms", "sent_bytes", "num_tokens")


def _sample(step: Step) -> list[list[float]]:
    return [[getattr(rank, field) for field in SAMPLE_FIELDS] for rank in step.ranks]
