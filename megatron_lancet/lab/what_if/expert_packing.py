"""Chooses the number of experts per rank: expert-parallel size against replicas of experts (Lina, expert packing).

With fewer expert-parallel ranks each holds more experts, sends less to others, and sums the gradients of its experts
with more replicas. Lina doubles the experts of a device until their compute covers one micro-op of an all-to-all. Here
a micro-op is one chunk's message in the plan for that size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.what_if.forecast import Forecast, Forecaster, Planner, Routing, no_overlap
from megatron_lancet.lab.what_if.layout import Layout, gradient_bytes
from megatron_lancet.planning.distinct_rows import DistinctParts, HopParts
from megatron_lancet.planning.profile import ModelFacts, Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, Dispatch, Plan
from megatron_lancet.schedule.units import BYTES_PER_MB

type PackingPlanner = Callable[[Profile, int | None], Plan]
"""Makes a plan for a profile, with a bound on a rank's activations in bytes; None for no bound."""

_WEIGHT_AND_GRADIENT = 2.0
_MOMENTS = 2.0


@dataclass(frozen=True)
class StateMemory:
    """Memory of weight, gradient and two moments of Adam, all of the same precision as the gradient.

    Attributes:
        is_distributed: whether the moments are divided among the ranks that sum a gradient (distributed optimizer).
    """

    is_distributed: bool = False

    def state_bytes(self, gradient_bytes: float, num_ranks: int) -> float:
        """Bytes on a rank for gradients that ``num_ranks`` ranks sum."""
        return gradient_bytes * (_WEIGHT_AND_GRADIENT + _MOMENTS / (num_ranks if self.is_distributed else 1))


@dataclass(frozen=True)
class Packing:
    """The figures of one expert-parallel size.

    Attributes:
        experts_per_rank: experts of each MoE layer on a rank.
        expert_replicas: number of ranks that hold the same experts (expert-DP).
        num_chunks: most chunks of a MoE layer in the plan.
        experts_ms: forward time of one chunk's experts on the rank that receives most rows.
        all_to_all_ms: time of the longer of the chunk's dispatch and combine, each in all its hops; 0 with a single
            rank.
        state_bytes: weights, gradients and optimizer states of a rank of the fullest stage.
        peak_bytes: ``state_bytes`` with activations and deferred weight gradients.
        fits: whether ``peak_bytes`` is within the memory limit.
    """

    layout: Layout
    experts_per_rank: int
    expert_replicas: int
    num_chunks: int
    experts_ms: float
    all_to_all_ms: float
    state_bytes: float
    peak_bytes: float
    fits: bool
    forecast: Forecast

    @property
    def covers(self) -> bool:
        """Whether a chunk's experts take at least as long as its all-to-all."""
        return self.experts_ms >= self.all_to_all_ms


@dataclass(frozen=True)
class PackingChoice:
    """All expert-parallel sizes, largest first, and the recommended ones.

    Attributes:
        fastest: the size with the shortest step of those that fit.
        fewest_experts: the first size that fits and covers (Lina's rule).
    """

    packings: tuple[Packing, ...]
    fastest: Packing
    fewest_experts: Packing


def pack_experts(
    forecaster: Forecaster,
    planner: PackingPlanner,
    world_size: int | None = None,
    num_micro_batches: int | None = None,
    routing: Routing | None = None,
    memory: StateMemory | None = None,
    limit_bytes: float | None = None,
) -> PackingChoice:
    """Predicts a step for each expert-parallel size that the ranks and the experts allow.

    Args:
        planner: makes the plan for each size above 1.
        world_size: number of ranks; None for the profiled number.
        num_micro_batches: micro-batches of a step on each pipeline; None for the profiled number.
        routing: how uneven routing is; None for the profile's.
        memory: memory of optimizer states; None for Adam without distributed optimizer.
        limit_bytes: memory limit of a rank; None for none.

    Raises:
        UsageError: nothing fits, or the model has no experts or the layout is impossible.
        RecordError: the profile lacks something.
    """
    facts = forecaster.profile.model
    world_size = world_size or facts.world_size
    memory = memory or StateMemory()
    packings = [
        _packing(forecaster, planner, layout, memory, limit_bytes)
        for size in expert_parallel_sizes(facts, world_size)
        for layout in [forecaster.layout(world_size, size, None, num_micro_batches, routing)]
    ]
    fitting = [one for one in packings if one.fits]
    if not fitting:
        least = min(packings, key=lambda one: one.peak_bytes)
        assert limit_bytes is not None
        raise UsageError(
            f"no expert-parallel size fits into {limit_bytes / BYTES_PER_MB:g} MB: the smallest, EP "
            f"{least.layout.ep_size}, takes about {least.peak_bytes / BYTES_PER_MB:.0f} MB. Allow more, use more "
            "ranks, the distributed optimizer, a smaller micro-batch or recompute"
        )
    # EP 1 has no messages and always covers; if it does not fit, the smallest size that fits comes closest.
    covering = [one for one in fitting if one.covers] or fitting[-1:]
    fastest = min(fitting, key=lambda one: (round(one.forecast.step_ms, 6), -one.layout.ep_size))
    return PackingChoice(tuple(packings), fastest, covering[0])


def expert_parallel_sizes(facts: ModelFacts, world_size: int) -> list[int]:
    """The sizes that divide the experts and the ranks of a pipeline stage, largest first.

    Raises:
        UsageError: the model has no experts, or the ranks are no multiple of the stages.
    """
    num_stages = len(set(facts.stage_of_layer))
    if not any(kind.has_experts for kind in facts.layer_kinds) or facts.num_experts < 1:
        raise UsageError("the profiled model has no experts, so there is nothing to pack")
    if world_size % num_stages:
        raise UsageError(f"{world_size} ranks are no multiple of {num_stages} pipeline stages. Choose another number")
    ranks = world_size // num_stages
    return [
        size for size in range(min(ranks, facts.num_experts), 0, -1) if ranks % size == facts.num_experts % size == 0
    ]


def _packing(
    forecaster: Forecaster, planner: PackingPlanner, layout: Layout, memory: StateMemory, limit_bytes: float | None
) -> Packing:
    replicas = layout.ranks_per_stage // layout.ep_size
    state_bytes = max(
        memory.state_bytes(dense, layout.ranks_per_stage) + memory.state_bytes(experts, replicas)
        for dense, experts in gradient_bytes(forecaster.profile, layout)
    )
    room_bytes = None if limit_bytes is None else max(1, round(limit_bytes - state_bytes))
    overlapping: Planner = lambda moved: planner(moved, room_bytes)  # noqa: E731
    forecast = forecaster.forecast(layout, overlapping if layout.ep_size > 1 else no_overlap)
    num_chunks, dim = _chunks_of(forecast.plan, forecaster.profile.model)
    experts_ms, all_to_all_ms = _micro_op_ms(forecaster.moved(layout), num_chunks, dim, forecast.plan.dispatch)
    peak_bytes = state_bytes + forecast.peak_bytes
    return Packing(
        layout,
        forecaster.profile.model.num_experts // layout.ep_size,
        replicas,
        num_chunks,
        experts_ms,
        all_to_all_ms,
        state_bytes,
        peak_bytes,
        limit_bytes is None or peak_bytes <= limit_bytes,
        forecast,
    )


def _chunks_of(plan: Plan, facts: ModelFacts) -> tuple[int, ChunkDim]:
    """The largest number of chunks of a MoE layer, and their dimension."""
    moe_layers = [number for number, kind in enumerate(facts.layer_kinds, 1) if kind.has_experts]
    segment = max((plan.segment_of(number) for number in moe_layers), key=lambda one: one.num_chunks)
    return segment.num_chunks, segment.chunk_dim


def _micro_op_ms(moved: Profile, num_chunks: int, dim: ChunkDim, dispatch: Dispatch) -> tuple[float, float]:
    """Forward times of a chunk's experts on the busiest rank, and of the longer of its two messages."""
    costs, facts = CostModel(moved), moved.model
    sent = costs.chunk_tokens(dim, num_chunks, facts.chunk_multiple(dim))[0] * facts.topk
    shares = moved.received_share
    received = sent * max(shares) * facts.ep_size
    moe_kind = next(kind for kind in facts.layer_kinds if kind.has_experts)
    experts_ms = costs.op_ms(moe_kind, OpKind.EXPERTS, Phase.FORWARD, dim, num_chunks, 0, received, dispatch)
    if facts.ep_size == 1:
        return experts_ms, 0.0
    if dispatch is Dispatch.TWO_HOP:
        return experts_ms, _two_hops_ms(costs, shares, sent / facts.topk)
    dispatched, returned = sent * (1 - min(shares)), sent * max(shares) * (facts.ep_size - 1)
    row_bytes = facts.row_bytes
    if dispatch is Dispatch.DEDUP:
        parts = DistinctParts.of(facts, shares, moved.routing)
        dispatched *= parts.sent[shares.index(min(shares))]
        returned *= parts.returned[shares.index(max(shares))]
        row_bytes = facts.dedup_row_bytes
    dispatch_bytes, combine_bytes = dispatched * row_bytes, returned * facts.combine_row_bytes
    return experts_ms, max(costs.message_ms(dispatch_bytes), costs.message_ms(combine_bytes))


def _two_hops_ms(costs: CostModel, shares: Sequence[float], num_tokens: float) -> float:
    """Time of both messages of a chunk's dispatch, or of its combine if that is longer."""
    facts = costs.model
    rows = HopParts.of(facts, shares, costs.profile.routing).rows(num_tokens)
    dispatch_ms = costs.message_ms(max(rows.node_sent) * facts.node_row_bytes, OpKind.NODE_DISPATCH)
    dispatch_ms += costs.message_ms(max(rows.local_sent) * facts.dedup_row_bytes, OpKind.LOCAL_DISPATCH)
    combine_ms = costs.message_ms(max(rows.local_received) * facts.combine_row_bytes, OpKind.LOCAL_COMBINE)
    combine_ms += costs.message_ms(max(rows.node_received) * facts.combine_row_bytes, OpKind.NODE_COMBINE)
    return max(dispatch_ms, combine_ms)
