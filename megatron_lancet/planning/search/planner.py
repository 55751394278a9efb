"""Chooses the plan with the shortest predicted step among those that fit into memory.

Small spaces are searched exhaustively. In others these candidates are simulated: every plan whose layers all run alike
(*uniform*), and the proposals of the dynamic program, each with every dW policy and window that can still win, and the
best of them with dWs placed into gaps too. So the result is never predicted slower than a uniform plan. Of tiles the
dynamic program gets the gaps of the two fastest uniform plans that have some.

If backwards may be paired with forwards, these plans are also the candidates for the two parts of a paired plan. In
very small spaces all pairs of them are simulated. In others few are, since a paired step takes four times as long to
simulate: the best plans and the plan of a single chunk everywhere in all micro-batches, then the best of these and the
single chunk with other settings at the ends of the step. (Beside a partner, a single chunk hides its messages without
the cost of chunks. At the ends it hides none.) A lone forward and a lone backward add up to an unpaired micro-batch, so
what is best there is best at the ends. The result is never predicted slower than the best unpaired plan.

All plans of a search have one dispatch. Between those with the same messages, the messages' bytes decide
(``chosen_dispatch``). One with more messages, such as two hops, is then compared with the better of these: the uniform
plans are simulated with both, and more messages are taken if the best plan is faster by more than
``_WORTHWHILE_PART`` leaves to noise.

Three simulators are used, from simple to complete:

- Plans are compared with the profile's shares in all layers and chunks. If more than ``MAX_DISTINCT`` of them differ,
  similar ones are merged, except the largest. Gradient reductions are left out.
- If gradients are reduced during the backward pass, the plans of the best ``NUM_WITH_GRADIENTS`` segmentations, with
  all their dW options, are simulated again with reductions, and the best of them wins. Any other plan is faster by at
  most the time that reductions cost the winner.
- The result's prediction uses the real shares, and the routing of single chunks if the profile has it.
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.dispatch import with_dispatch
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.dw_placement import planned_gaps
from megatron_lancet.planning.search.dynamic_program import DynamicProgram
from megatron_lancet.planning.search.finalists import NUM_FINALISTS, distinct, simplicity
from megatron_lancet.planning.search.search_space import Exclusion, Limits, SearchSpace
from megatron_lancet.planning.shares import merge_similar_shares
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.rows import Loads
from megatron_lancet.planning.simulation.simulator import Prediction, Simulator
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.plan import DwPolicy, Plan, Segment, paired

MAX_EXHAUSTIVE = 300
"""Largest number of segmentations that is searched exhaustively; about two seconds for a few layers."""
MAX_DISTINCT = 4
"""Most ranks that are simulated while plans are compared."""
NUM_WITH_GRADIENTS = 4
"""Number of segmentations that are simulated with gradient reductions."""
_MAX_PAIRED = 8
"""Largest number of segmentations that are all tried in the middle of a step with all at its ends."""
_NUM_UNIFORM_MIDDLES = 4
_NUM_OTHER_MIDDLES = 2
_NUM_MIDDLES_WITH_ENDS = 2
_NUM_ENDS = 2
NUM_AT_ENDS = 2
"""Micro-batches of a step that lack a partner in their forward or their backward."""
_NUM_PAIRED_WITH_GAPS = 2
_NUM_LISTED = 16
_NUM_WITH_GAPS = 6
_NUM_RIVALS = 6
"""Number of segmentations, the fastest ones with one dispatch, that are simulated with its rival."""
_NUM_TILED = 2
"""Number of segmentations with tiles, the fastest with all layers alike, whose tiles are tried in single segments."""
_NUM_COMPARED = 2
"""Number of segmentations with each dispatch whose dW options are all simulated before one dispatch is taken."""
_WORTHWHILE_PART = 0.99
"""More messages are taken if a step takes at most this part of the time that it takes without."""
_DIGITS = 6
"""Predictions that agree to the nanosecond count as equal; then the simpler plan wins."""


@dataclass(frozen=True)
class Alternative:
    """A plan that was simulated, and whether it fits into the memory bound."""

    plan: Plan
    prediction: Prediction
    fits: bool

    def rank(self) -> tuple[object, ...]:
        """Sort key, lower is better: fits (else smaller), faster, simpler."""
        fits = 0 if self.fits else self.prediction.peak_bytes
        return (fits, round(self.prediction.step_ms, _DIGITS), *simplicity(self.plan))


@dataclass(frozen=True)
class PlannedStep:
    """A plan and how it was found.

    Attributes:
        no_overlap: prediction of one chunk without deferred dWs and with plain dispatch, as in stock, for comparison;
            None if the limits forbid one chunk or such dWs.
        alternatives: the best simulated plans and all simulated uniform plans; the chosen plan is the first.
        excluded: parts of the search space that were not considered, and why.
        num_simulated: number of plans whose whole step was simulated.
        is_exact: whether every plan of the space was simulated.
        warning: message for the user, for example if no plan fits into memory; None if there is none.
        limits: the restrictions of the search.
        finalists: a simple plan of each of the best kinds that is predicted about as fast as its kind's best.
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
    finalists: tuple[Plan, ...]


def make_plan(profile: Profile, limits: Limits | None = None, max_exhaustive: int = MAX_EXHAUSTIVE) -> PlannedStep:
    """Searches the best plan for a profile; deterministic.

    Args:
        limits: restrictions on the plan; None for none.
        max_exhaustive: largest number of segmentations up to which the whole space is searched.

    Raises:
        RecordError: the profile lacks something that every plan needs, or the limits leave no plan.
    """
    with _without_collector():
        return Planner(profile, limits or Limits(), max_exhaustive).choose()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disables garbage collection: a search makes many objects but few cycles, and would spend a sixth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Planner:
    """One search for a plan."""

    def __init__(self, profile: Profile, limits: Limits, max_exhaustive: int = MAX_EXHAUSTIVE) -> None:
        """
        Raises:
            RecordError: see :func:`make_plan`.
        """
        costs = CostModel(profile)
        if limits.max_memory_bytes is not None and not costs.knows_memory:
            raise RecordError("the profile has no memory use of layers, so a memory bound can't be enforced")
        plain = costs if profile.gradients is None else CostModel(replace(profile, gradients=None))
        shares = Loads.of(profile.model, profile.received_share).shares
        merged = merge_similar_shares(shares, MAX_DISTINCT)
        self._has_merged_shares = merged != shares
        self._simulator = Simulator(plain, merged)
        self._reduction_simulator = None if profile.gradients is None else Simulator(costs, merged)
        self._complete_simulator = self._reduction_simulator or self._simulator
        if self._has_merged_shares or profile.routing:
            self._complete_simulator = Simulator(costs)
        self._limits = limits
        self._space = SearchSpace.of(costs, limits)
        num_segmentations = self._space.num_segmentations()
        self._is_exact = self._space.is_uniform or num_segmentations <= max_exhaustive
        self._pairs_all = self._is_exact and num_segmentations <= _MAX_PAIRED
        self._seen: dict[Plan, Alternative] = {}
        self._best: Alternative | None = None
        self._searched: set[tuple[Segment, ...]] = set()
        self._num_rejected = 0

    def choose(self) -> PlannedStep:
        """Searches the space and returns the best plan."""
        if self._space.rival is not None:
            self._space = self._with_faster_dispatch(self._space, self._space.rival)
        uniform = list(self._space.uniform())
        if self._is_exact:
            self._search(self._space.segmentations(), may_skip=False)
            self._place_gaps(list(self._seen))
        else:
            self._search(uniform, may_skip=True)
            self._search(DynamicProgram(self._simulator, self._without_slow_tiles()).proposals(), may_skip=True)
            filling = [one.plan for one in self._sorted() if one.plan.dw_policy is DwPolicy.FILL]
            self._place_gaps(filling[:_NUM_WITH_GAPS])
        if True in self._space.pairing:
            self._search_pairs(uniform)
        ordered = self._allowed(self._sorted())
        if self._reduction_simulator is not None:
            ordered = self._with_reductions(ordered, self._reduction_simulator)
        if self._has_merged_shares:
            ordered = self._with_real_memory(ordered)
        best = ordered[0]
        uniform_set = set(uniform)
        no_overlap = next((one.plan for one in ordered if one.plan.overlaps_nothing), None)
        listed = ordered[:_NUM_LISTED] + [one for one in ordered[_NUM_LISTED:] if one.plan.segments in uniform_set]
        return PlannedStep(
            plan=best.plan,
            prediction=self._complete_simulator.predict(best.plan),
            no_overlap=None if no_overlap is None else self._complete_simulator.predict(_as_in_stock(no_overlap)),
            alternatives=tuple(listed),
            excluded=(*self._space.excluded, *self._lost_dispatches(best.plan)),
            num_simulated=len(self._seen) + self._num_rejected,
            is_exact=self._pairs_all if True in self._space.pairing else self._is_exact,
            warning=None if best.fits else self._does_not_fit(best),
            limits=self._limits,
            finalists=tuple(self._finalists(ordered)),
        )

    def _finalists(self, ordered: Sequence[Alternative]) -> list[Plan]:
        """See :attr:`PlannedStep.finalists`; the first of ``ordered`` is the fastest by prediction."""
        bound = self._limits.max_memory_bytes
        fitting = [(one.plan, one.prediction.step_ms) for one in ordered if one.fits]
        return [
            plan
            for plan in distinct(fitting or [(ordered[0].plan, ordered[0].prediction.step_ms)], NUM_FINALISTS)
            if plan == ordered[0].plan or bound is None or self._complete_simulator.predict(plan).peak_bytes <= bound
        ]

    def _without_slow_tiles(self) -> SearchSpace:
        """The space without the tiles that are slow if all layers have them: choices cost the dynamic program time."""
        tiled = [one.plan.segments for one in self._sorted() if one.plan.has_tiles]
        return self._space.with_tiles_of(list(dict.fromkeys(tiled))[:_NUM_TILED])

    def _with_faster_dispatch(self, space: SearchSpace, rival: Dispatch) -> SearchSpace:
        """The space with the dispatch whose uniform plans are faster; the simulated ones of that are kept."""
        seen = {}
        fast: list[tuple[Segment, ...]] = []
        for dispatch in (space.dispatch, rival):
            self._seen, self._best = {}, None
            own = space.with_dispatch(dispatch)
            segmentations = list(own.uniform())
            if fast:  # what is slow with one dispatch is not the best with another
                segmentations = [one for one in segmentations if one in fast]
            self._search_few(own, segmentations)
            seen[dispatch] = self._sorted()
            untiled = dict.fromkeys(one.plan.segments for one in seen[dispatch] if not one.plan.has_tiles)
            fast = list(dict.fromkeys([segmentations[0], *list(untiled)[:_NUM_RIVALS]]))
        best = {dispatch: alternatives[0] for dispatch, alternatives in seen.items()}
        few, many = sorted(best.values(), key=lambda found: found.plan.dispatch.all_to_alls_per_layer)
        is_faster = many.prediction.step_ms <= _WORTHWHILE_PART * few.prediction.step_ms
        winner, loser = (many, few) if many.fits and (is_faster or not few.fits) else (few, many)
        chosen, other = winner.plan.dispatch, loser.plan.dispatch
        self._seen = {alternative.plan: alternative for alternative in seen[chosen]}
        self._best, self._num_rejected = best[chosen], len(seen[other])
        why = (
            f"of the plans with all layers alike, the best takes {loser.prediction.step_ms:.1f} ms with it and "
            f"{winner.prediction.step_ms:.1f} ms with {chosen}"
        )
        return replace(space.with_dispatch(chosen), rival=None, lost=(*space.lost, (other, why)))

    def _search_few(self, space: SearchSpace, segmentations: Iterable[tuple[Segment, ...]]) -> None:
        """Simulates these segmentations with one dW option each, and the fastest of them with all options."""
        for segments in segmentations:
            self._consider(next(space.dw_options(segments)))
        for one in self._sorted()[:_NUM_COMPARED]:
            for plan in space.dw_options(one.plan.segments):
                self._consider(plan)

    def _lost_dispatches(self, plan: Plan) -> Iterator[Exclusion]:
        """The dispatches that are possible but not as good, with the time that the chosen plan would take with them."""
        for dispatch, why in self._space.lost:
            step_ms = self._complete_simulator.predict(with_dispatch(plan, dispatch)).step_ms
            yield Exclusion(f"dispatch={dispatch}", f"{why}; this plan would take {step_ms:.1f} ms with it")

    def _with_reductions(self, ordered: list[Alternative], simulator: Simulator) -> list[Alternative]:
        """The best segmentations and the plan without overlap, predicted with gradient reductions."""
        segmentations = list(dict.fromkeys(_segmentation(one.plan) for one in ordered))[:NUM_WITH_GRADIENTS]
        # The best without pairing stays among them: reductions share the link with a backward that has no partner.
        segmentations += [_segmentation(one.plan) for one in ordered if not one.plan.is_paired][:1]
        chosen = [one for one in ordered if _segmentation(one.plan) in segmentations or one.plan.overlaps_nothing]
        return _best_first(replace(one, prediction=simulator.predict(one.plan)) for one in chosen)

    def _with_real_memory(self, ordered: list[Alternative]) -> list[Alternative]:
        """Moves the first plans behind the others if they don't fit with the real shares."""
        bound = self._limits.max_memory_bytes
        for index, one in enumerate(ordered):
            if not one.fits or bound is None or self._complete_simulator.predict(one.plan).peak_bytes <= bound:
                return [*ordered[index:], *(replace(other, fits=False) for other in ordered[:index])]
        return [replace(other, fits=False) for other in ordered]

    def _search(self, segmentations: Iterable[tuple[Segment, ...]], may_skip: bool) -> None:
        """Simulates these segmentations with each dW option.

        Args:
            may_skip: whether to skip plans with deferred dWs that would lose even without exposed backward time.
        """
        for segments in segmentations:
            if segments in self._searched:
                continue
            self._searched.add(segments)
            floor_ms = self._floor_ms(segments) if may_skip else 0.0
            for plan in self._space.dw_options(segments):
                best = self._best
                cannot_win = best is not None and best.fits and floor_ms > best.prediction.step_ms
                if not (cannot_win and plan.dw_policy is DwPolicy.FILL):
                    self._consider(plan)
            self._simulator.forget(segments)

    def _search_pairs(self, uniform: Sequence[tuple[Segment, ...]]) -> None:
        """Simulates paired plans; those without pairing have been simulated."""
        plans = [one.plan for one in self._sorted()]
        # A forward paired with the backward fills the same waits as tiles do: both are combined only if the user sets
        # tiles.
        untiled = [plan for plan in plans if not plan.has_tiles]
        by_speed = list(dict.fromkeys(plan.segments for plan in untiled or plans))
        options = {segments: list(self._space.dw_options(segments)) for segments in by_speed}
        if self._pairs_all:
            for middle, ends in product(by_speed, repeat=2):
                self._pair(options[middle], options[ends])
            self._place_gaps([plan for plan in self._seen if plan.is_paired])
            return
        whole = [one for one in uniform if one in by_speed and all(segment.num_chunks == 1 for segment in one)]
        fast_uniform = [segments for segments in by_speed if segments in set(uniform)][:_NUM_UNIFORM_MIDDLES]
        first = [
            next((index for index, one in enumerate(options[by_speed[0]]) if one.dw_policy is policy), None)
            for policy in DwPolicy
        ]
        few = [index for index in first if index is not None]
        for middle in dict.fromkeys([*whole, *fast_uniform, *by_speed[:_NUM_OTHER_MIDDLES]]):
            self._pair([options[middle][index] for index in few], [options[middle][index] for index in few])
        middles = list(dict.fromkeys(one.plan.segments for one in self._paired()))[:_NUM_MIDDLES_WITH_ENDS]
        if self._simulator.costs.model.num_micro_batches > NUM_AT_ENDS:
            middles += whole
        for middle, ends in product(dict.fromkeys(middles), dict.fromkeys([*whole, *by_speed[:_NUM_ENDS]])):
            self._pair([options[middle][index] for index in few], [options[ends][index] for index in few])
        best = self._paired()[0].plan
        self._pair(options[best.segments], options[best.at_ends.segments])
        filling = [one.plan for one in self._paired() if one.plan.dw_policy is DwPolicy.FILL]
        self._place_gaps(filling[:_NUM_PAIRED_WITH_GAPS])

    def _pair(self, middles: Sequence[Plan], ends: Sequence[Plan]) -> None:
        """Simulates a middle with the ends of the same dW option, for each option."""
        for in_middle, at_ends in zip(middles, ends, strict=True):
            self._consider(paired(in_middle, at_ends))

    def _paired(self) -> list[Alternative]:
        return [one for one in self._sorted() if one.plan.is_paired]

    def _floor_ms(self, segments: tuple[Segment, ...]) -> float:
        """Lower bound on the step time of plans with these segments and deferred dWs."""
        plan = Plan(segments, DwPolicy.NONE, dispatch=self._space.dispatch)
        at_once = self._seen.get(plan)
        prediction = at_once.prediction if at_once else self._simulator.predict(plan)
        link = self._simulator.costs.profile.link
        return prediction.floor_ms / max(1.0, link.compute_slowdown, link.memory_slowdown or 1.0)

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
                with_gaps = planned_gaps(self._simulator, plan)
                if with_gaps != plan:
                    self._consider(with_gaps)

    def _sorted(self) -> list[Alternative]:
        return _best_first(self._seen.values())

    def _allowed(self, ordered: list[Alternative]) -> list[Alternative]:
        """Leaves out the plans without pairing that were simulated only as parts of paired ones."""
        return [one for one in ordered if one.plan.is_paired in self._space.pairing]

    def _does_not_fit(self, best: Alternative) -> str:
        bound = self._limits.max_memory_bytes
        assert bound is not None
        return (
            f"no plan fits into {bound / 1e6:g} MB; the smallest, {best.plan}, takes about "
            f"{best.prediction.peak_bytes / 1e6:g} MB and was chosen. Use a smaller micro-batch or recompute"
        )


def _best_first(alternatives: Iterable[Alternative]) -> list[Alternative]:
    """Sorts by rank, and by text between equal ranks."""
    return sorted(alternatives, key=lambda one: (*one.rank(), one.plan.to_json()))


def _as_in_stock(no_overlap: Plan) -> Plan:
    return replace(no_overlap, dispatch=PLAIN)


def _segmentation(plan: Plan) -> tuple[object, ...]:
    return plan.segments, plan.is_paired, plan.at_ends.segments
