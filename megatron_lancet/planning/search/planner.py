"""Chooses the plan that is predicted fastest among those that fit into memory.

Small spaces are searched whole. In others these candidates are simulated: every plan whose layers all run alike
(*uniform*), and what the dynamic program proposes; each with every dW policy and window unless it can't win any more,
the best of them with dWs placed into gaps too. So the result is never predicted slower than a uniform plan.

Plans are compared with the same routing in all layers and chunks: the profile's shares. Where more than
``MAX_DISTINCT`` ranks receive different ones, similar ranks are made equal, the busiest as it is. The result's
prediction is then made with the real shares, and with the routing of single chunks where the profile knows it.

Where gradients are reduced beside the backward pass, plans are searched without that. The plans of the best
``NUM_WITH_GRADIENTS`` segmentations, with all their dW options, are then simulated with it, and the best of them wins:
a plan that was not among them is at most faster by what reductions cost the winner.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megatron_lancet.files import RecordError
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.dw_placement import best_fit_gaps
from megatron_lancet.planning.search.dynamic_program import DynamicProgram
from megatron_lancet.planning.search.search_space import Exclusion, Limits, SearchSpace
from megatron_lancet.planning.shares import merge_similar_shares
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Prediction, Simulator
from megatron_lancet.schedule.plan import DwPolicy, Plan, Segment

MAX_EXHAUSTIVE = 300
"""Segmentations that are all simulated; about two seconds for a few layers."""
MAX_DISTINCT = 4
"""Ranks that are simulated while plans are compared."""
NUM_WITH_GRADIENTS = 4
"""Segmentations that are simulated with gradient reductions."""
_NUM_LISTED = 16
_NUM_WITH_GAPS = 6
_DIGITS = 6
"""Predictions that agree to the nanosecond are equal: then the simpler plan wins."""


@dataclass(frozen=True)
class Alternative:
    """A plan that was considered.

    Attributes:
        fits: whether it keeps within the memory bound.
    """

    plan: Plan
    prediction: Prediction
    fits: bool

    def rank(self) -> tuple[object, ...]:
        """Lower is better: fits (else smaller), faster, fewer segments, fewer chunks, simpler dWs."""
        plan = self.plan
        chunks = [segment.num_chunks for segment in plan.segments]
        return (
            0 if self.fits else self.prediction.peak_bytes,
            round(self.prediction.step_ms, _DIGITS),
            len(chunks),
            max(chunks),
            sum(chunks),
            plan.dw_policy is DwPolicy.FILL,
            plan.dw_window,
            len(plan.gaps),
        )


@dataclass(frozen=True)
class PlannedStep:
    """A plan and how it was found.

    Attributes:
        plan: the chosen one.
        prediction: of it.
        no_overlap: prediction of one chunk without deferred dWs, for comparison; None where the limits forbid it.
        alternatives: the best that were simulated, and every uniform plan among them; the chosen one is the first.
        excluded: what was not considered, and why.
        num_simulated: plans whose whole step was simulated.
        is_exact: whether that was every plan of the space.
        warning: what the user must know, for example that nothing fits into memory; None if nothing.
        limits: that it was found under.
    """

    plan: Plan
    prediction: Prediction
    no_overlap: Prediction | None
    alternatives: tuple[Alternative, ...]
    excluded: tuple[Exclusion, ...]
    num_simulated: int
    is_exact: bool
    warning: str | None
    limits: Limits


def make_plan(profile: Profile, limits: Limits | None = None, max_exhaustive: int = MAX_EXHAUSTIVE) -> PlannedStep:
    """The plan for a profile; the same for the same arguments.

    Args:
        limits: what a plan may be; None for no limits other than the profile's.
        max_exhaustive: search the whole space if it has no more segmentations than that.

    Raises:
        RecordError: the profile lacks something that every plan needs, or the limits leave no plan.
    """
    with _without_collector():
        return Planner(profile, limits or Limits(), max_exhaustive).choose()


@contextmanager
def _without_collector() -> Iterator[None]:
    """A search makes many small objects and hardly a cycle: walking them all again and again is a sixth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Planner:
    """One search."""

    def __init__(self, profile: Profile, limits: Limits, max_exhaustive: int = MAX_EXHAUSTIVE) -> None:
        """
        Raises:
            RecordError: see :func:`make_plan`.
        """
        costs = CostModel(profile)
        if limits.max_memory_bytes is not None and not costs.knows_memory:
            raise RecordError("the profile does not say what layers keep in memory, so a memory bound can't be held")
        self._costs = costs
        plain = costs if profile.gradients is None else CostModel(replace(profile, gradients=None))
        self._simulator = Simulator(plain, costs.profile.received_share)
        shares = self._simulator.loads.shares
        few = merge_similar_shares(shares, MAX_DISTINCT)
        self._has_merged_shares = few != shares
        self._is_simplified = self._has_merged_shares or bool(profile.routing)
        if self._has_merged_shares:
            self._simulator = Simulator(plain, few)
        self._with_reductions = None if profile.gradients is None else Simulator(costs, few)
        self._limits = limits
        self._space = SearchSpace.of(costs, limits)
        self._is_exact = self._space.num_segmentations() <= max_exhaustive
        self._seen: dict[Plan, Alternative] = {}
        self._best: Alternative | None = None

    def choose(self) -> PlannedStep:
        """Search, and say what was found."""
        uniform = list(self._space.uniform())
        if self._is_exact:
            self._search(self._space.segmentations(), may_skip=False)
            self._place_gaps(list(self._seen))
        else:
            self._search(uniform, may_skip=True)
            self._search(DynamicProgram(self._simulator, self._space).proposals(), may_skip=True)
            filling = [one.plan for one in self._sorted() if one.plan.dw_policy is DwPolicy.FILL]
            self._place_gaps(filling[:_NUM_WITH_GAPS])
        ordered = self._sorted()
        if self._with_reductions is not None:
            ordered = self._with_gradients(ordered, self._with_reductions)
        if self._has_merged_shares:
            ordered = self._with_real_memory(ordered)
        best = ordered[0]
        uniform_set = set(uniform)
        no_overlap = next(
            (self._with_real_shares(one.plan, one.prediction) for one in ordered if _is_no_overlap(one.plan)), None
        )
        listed = ordered[:_NUM_LISTED] + [one for one in ordered[_NUM_LISTED:] if one.plan.segments in uniform_set]
        return PlannedStep(
            plan=best.plan,
            prediction=self._with_real_shares(best.plan, best.prediction),
            no_overlap=no_overlap,
            alternatives=tuple(listed),
            excluded=self._space.excluded,
            num_simulated=len(self._seen),
            is_exact=self._is_exact,
            warning=None if best.fits else self._does_not_fit(best),
            limits=self._limits,
        )

    def _with_gradients(self, ordered: list[Alternative], simulator: Simulator) -> list[Alternative]:
        """The best, and one chunk without overlap, with gradient reductions on the wire; the others are left out."""
        segmentations = list(dict.fromkeys(one.plan.segments for one in ordered))[:NUM_WITH_GRADIENTS]
        chosen = [one for one in ordered if one.plan.segments in segmentations or _is_no_overlap(one.plan)]
        return _best_first(replace(one, prediction=simulator.predict(one.plan)) for one in chosen)

    def _with_real_memory(self, ordered: list[Alternative]) -> list[Alternative]:
        """The best whose deferred dWs fit on the real ranks too goes first; what doesn't fit goes last."""
        bound = self._limits.max_memory_bytes
        for index, one in enumerate(ordered):
            if not one.fits or bound is None or self._with_real_shares(one.plan, one.prediction).peak_bytes <= bound:
                return [*ordered[index:], *(replace(other, fits=False) for other in ordered[:index])]
        return [replace(other, fits=False) for other in ordered]

    def _with_real_shares(self, plan: Plan, prediction: Prediction) -> Prediction:
        return Simulator(self._costs).predict(plan) if self._is_simplified else prediction

    def _search(self, segmentations: Iterable[tuple[Segment, ...]], may_skip: bool) -> None:
        """Simulate these with each dW option.

        Args:
            may_skip: leave out a plan that defers dWs if it would lose even with a backward that never stands still.
        """
        done = {plan.segments for plan in self._seen}
        for segments in segmentations:
            if segments in done:
                continue
            done.add(segments)
            floor_ms = self._floor_ms(segments) if may_skip else 0.0
            for plan in self._space.dw_options(segments):
                best = self._best
                hopeless = best is not None and best.fits and floor_ms > best.prediction.step_ms
                if not (hopeless and plan.dw_policy is DwPolicy.FILL):
                    self._consider(plan)
            self._simulator.forget(segments)

    def _floor_ms(self, segments: tuple[Segment, ...]) -> float:
        """No plan that defers dWs and has these segments is faster."""
        at_once = self._seen.get(Plan(segments, DwPolicy.NONE))
        prediction = at_once.prediction if at_once else self._simulator.predict(Plan(segments, DwPolicy.NONE))
        return prediction.floor_ms / max(1.0, self._simulator.costs.profile.link.compute_slowdown)

    def _consider(self, plan: Plan) -> None:
        if plan in self._seen:
            return
        prediction = self._simulator.predict(plan)
        bound = self._limits.max_memory_bytes
        alternative = Alternative(plan, prediction, bound is None or prediction.peak_bytes <= bound)
        self._seen[plan] = alternative
        if self._best is None or alternative.rank() < self._best.rank():
            self._best = alternative

    def _place_gaps(self, plans: Iterable[Plan]) -> None:
        for plan in plans:
            if plan.dw_policy is DwPolicy.FILL:
                gaps = best_fit_gaps(self._simulator, plan)
                if gaps:
                    self._consider(replace(plan, gaps=gaps))

    def _sorted(self) -> list[Alternative]:
        return _best_first(self._seen.values())

    def _does_not_fit(self, best: Alternative) -> str:
        bound = self._limits.max_memory_bytes
        assert bound is not None
        return (
            f"no plan fits into {bound / 1e6:g} MB: the smallest, {best.plan}, takes about "
            f"{best.prediction.peak_bytes / 1e6:g} MB. It was chosen all the same; "
            "use a smaller micro-batch or recompute"
        )


def _best_first(alternatives: Iterable[Alternative]) -> list[Alternative]:
    """Where ranks are equal, in the order of their texts."""
    return sorted(alternatives, key=lambda one: (*one.rank(), one.plan.to_json()))


def _is_no_overlap(plan: Plan) -> bool:
    return plan.num_chunks == 1 and plan.dw_policy is DwPolicy.NONE
