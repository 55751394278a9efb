"""The few plans of a search that are worth measuring, and which of two plans is simpler."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from megatron_lancet.planning.dispatch import with_dispatch
from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.plan import DwPolicy, Plan

NUM_FINALISTS = 3
CLOSE_PART = 1.15
"""Plans that are predicted slower than this times the best are not measured: most predictions are better than that."""

EQUAL_PART = 1.02
"""Plans of a kind within this times its best count as equal: predictions are off by about as much."""


def simplicity(plan: Plan) -> tuple[int, ...]:
    """Sort key, lower is simpler: :func:`simplicity_of_order` first, then dWs, then the plan at the ends of a step."""
    at_ends = [segment.num_chunks for segment in plan.at_ends.segments]
    return (
        *simplicity_of_order(plan),
        plan.dw_policy is DwPolicy.FILL,
        plan.dw_window,
        len(plan.gaps),
        plan.at_ends.segments != plan.segments,
        len(at_ends),
        sum(at_ends),
    )


def simplicity_of_order(plan: Plan) -> tuple[int, ...]:
    """Sort key, lower is simpler: unpaired, fewer segments, chunks and tiles."""
    chunks = [segment.num_chunks for segment in plan.segments]
    most_tiles = max(segment.tiles for segment in plan.segments)
    return plan.is_paired, len(chunks), max(chunks), sum(chunks), most_tiles


def kind_of(plan: Plan) -> tuple[object, ...]:
    """Equal for plans that overlap in the same way: they differ in layers of segments, windows, gaps or the ends.

    Whole micro-batches hide messages by dWs and by a partner; at the ends of a step, chunks make another kind of them.
    """
    ranges = frozenset((one.num_chunks, one.range) for one in plan.segments if one.num_chunks > 1)
    return plan.is_paired, ranges, *_sizes_of(plan)


def _sizes_of(plan: Plan) -> tuple[object, ...]:
    """Equal for kinds with ops of the same sizes: they differ in pairing and in the ops that are cut."""
    cuts = {(one.num_chunks, one.num_chunks > 1 and one.chunk_dim, one.tiles > 0) for one in plan.segments}
    is_whole, has_whole_ends = (
        all(segment.num_chunks == 1 for segment in one) for one in (plan.segments, plan.at_ends.segments)
    )
    # Of whole micro-batches without a partner, dWs are all that hides a message.
    return plan.dispatch, frozenset(cuts), is_whole and (plan.dw_policy, has_whole_ends)


def distinct(best_first: Iterable[tuple[Plan, float]], most: int) -> list[Plan]:
    """Returns one plan of each of the best kinds: a simple one that is predicted as fast as the kind's best.

    A plan whose ops have the same sizes as the ops of a better plan comes after the others: both predictions have the
    same errors in the times of ops.

    Args:
        best_first: plans and their predicted steps in ms, the best first.
        most: number of plans, at most.
    """
    kinds: dict[tuple[object, ...], list[tuple[Plan, float]]] = {}
    best_ms: float | None = None
    for plan, step_ms in best_first:
        best_ms = step_ms if best_ms is None else best_ms
        if step_ms <= CLOSE_PART * best_ms:
            kinds.setdefault(kind_of(plan), []).append((plan, step_ms))
    of_kinds = [_simplest(plans) for plans in kinds.values()]
    sizes = [_sizes_of(plan) for plan in of_kinds]
    new_sizes_first = sorted(range(len(sizes)), key=lambda index: sizes[index] in sizes[:index])
    return [of_kinds[index] for index in new_sizes_first][:most]


def with_another_dispatch(
    plan: Plan, plan_ms: float, dispatches: Iterable[Dispatch], step_ms_of: Callable[[Plan], float]
) -> Plan | None:
    """Returns the plan with another dispatch. The planner compares dispatches in unpaired plans, and keeps only one.

    Args:
        plan_ms: its predicted step.
        dispatches: those that the run allows.
        step_ms_of: predicts a step in ms.

    Returns:
        The plan with the fastest of the other dispatches; None if none is predicted about as fast as ``plan``.
    """
    # Gaps name the all-to-alls of one dispatch.
    pairing = None if plan.pairing is None else replace(plan.pairing, end_gaps=())
    ungapped = replace(plan, gaps=(), pairing=pairing)
    others = [with_dispatch(ungapped, dispatch) for dispatch in dispatches if dispatch != plan.dispatch]
    predicted = [(other, step_ms_of(other)) for other in others]
    close = [one for one in predicted if one[1] <= CLOSE_PART * plan_ms]
    return min(close, key=lambda one: one[1])[0] if close else None


def _simplest(plans: Sequence[tuple[Plan, float]]) -> Plan:
    """Returns the simplest plan that is predicted as fast as the first; of two dW policies, deferral.

    Predictions lack waits of ranks that drift apart, which deferred dWs fill. In trainings of two chunks dWs at once
    took 1 to 5 % longer than deferred ones that were predicted as fast.
    """
    _, best_ms = plans[0]

    def key(plan: Plan) -> tuple[int, ...]:
        return *simplicity_of_order(plan), plan.dw_policy is DwPolicy.NONE, *simplicity(plan)

    return min((plan for plan, step_ms in plans if step_ms <= EQUAL_PART * best_ms), key=key)
