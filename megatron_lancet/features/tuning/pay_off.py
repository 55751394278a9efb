"""Whether tuning has cost less time than its plan has saved since then. No torch here."""

from dataclasses import dataclass, field

from megatron_lancet.report.compared import Compared
from megatron_lancet.training.observe.step_stats import NUM_WARM_UP_STEPS


@dataclass
class PayOff:
    """Counts the time of a run, by one rank's clock, against as many steps without overlap.

    A run's first steps do not count: they are slow in any run.

    Attributes:
        cost_ms: time that tuning took beyond steps without overlap, profiles and planning included.
        since_step: the step after which the run was no slower than without overlap, and has stayed so; None before.
        balance_ms: time that the run is ahead of one without overlap; negative if it is behind.
    """

    cost_ms: float = 0.0
    since_step: int | None = None
    balance_ms: float = 0.0
    _num_steps: int = 0
    _num_micro_batches: int = 0
    _tuning: list[tuple[int, float]] = field(default_factory=list)
    _compared: Compared | None = None

    def add(
        self, iteration: int, elapsed_ms: float, compared: Compared | None, is_settled: bool, num_micro_batches: int
    ) -> None:
        """Counts a step, if it has as many micro-batches as the compared steps.

        Args:
            iteration: its number.
            elapsed_ms: its time, with the work of tuning around it.
            compared: the measured steps; None before a plan was chosen.
            is_settled: whether it ran under the chosen plan.
            num_micro_batches: of this step.
        """
        self._num_steps += 1
        if self._num_steps <= NUM_WARM_UP_STEPS:
            return
        if not is_settled:
            self._tuning.append((num_micro_batches, elapsed_ms))
        if compared is None:
            return
        if self._tuning and (is_settled or compared is not self._compared):  # a search has ended
            self._book(compared)
        if is_settled and num_micro_batches == self._num_micro_batches:
            self.balance_ms += compared.no_overlap_ms - elapsed_ms
        if self.balance_ms < 0:
            self.since_step = None
        elif self.since_step is None and is_settled:
            self.since_step = iteration

    def _book(self, compared: Compared) -> None:
        """Counts the steps of a search."""
        self._compared, self._num_micro_batches = compared, self._tuning[-1][0]
        same = [ms for number, ms in self._tuning if number == self._num_micro_batches]
        lost_ms = sum(same) - len(same) * compared.no_overlap_ms
        self.cost_ms, self.balance_ms = self.cost_ms + lost_ms, self.balance_ms - lost_ms
        self._tuning.clear()

    def as_text(self, compared: Compared) -> str:
        """A sentence without its end.

        Args:
            compared: the measured steps.
        """
        cost_s = self.cost_ms / 1e3
        if self.cost_ms <= 0 <= self.balance_ms:
            return "tuning cost no time: its steps were no slower than without overlap"
        saved_ms = compared.no_overlap_ms - compared.own_ms
        if saved_ms <= 0:  # later steps may still be faster, as the machine's speed changes
            return f"tuning cost {cost_s:.1f} s, which its plan does not save"
        if self.since_step is not None:
            return f"tuning cost {cost_s:.1f} s and had paid for itself after step {self.since_step:,}"
        num_steps = -self.balance_ms / saved_ms
        return (
            f"tuning cost {cost_s:.1f} s and has not paid for itself yet: {-self.balance_ms / 1e3:.1f} s are left, "
            f"about {num_steps:,.0f} steps at {saved_ms:.0f} ms each"
        )
