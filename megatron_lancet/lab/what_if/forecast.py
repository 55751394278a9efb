"""Predicts a step in another layout: moves the profile there, makes a plan for it, and simulates that."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.what_if.cluster import Cluster, Level, fitted_level
from megatron_lancet.lab.what_if.layout import (
    Layout,
    check_layout,
    gradient_ms,
    in_layout,
    with_moved_reduction,
)
from megatron_lancet.lab.what_if.routing import even_share, rebinned_share, zipf_share
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.planning.profile import ModelFacts, Profile
from megatron_lancet.planning.shares import merge_similar_shares
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Prediction, Simulator
from megatron_lancet.planning.stages import slots_of_bubble, split_at_stages
from megatron_lancet.schedule.plan import ChunkDim, Dispatch, DwPolicy, Plan, fixed_plan

type Planner = Callable[[Profile], Plan]
"""Makes a plan for a profile."""
_MAX_DISTINCT = 6
"""Most distinct shares of a group: each is simulated, and a large group would take minutes."""


@dataclass(frozen=True)
class NetworkChoice:
    """The user's settings of the network; None for measured values.

    Attributes:
        ranks_per_node: number of ranks of a node; None for one node with all ranks.
        intra_gbps: Gb/s of one rank inside a node.
        intra_latency_us: latency of one message inside a node.
        inter_gbps: Gb/s of one rank between nodes; None for the value inside a node.
        inter_latency_us: latency of one message between nodes; None for the value inside a node.
    """

    ranks_per_node: int | None = None
    intra_gbps: float | None = None
    intra_latency_us: float | None = None
    inter_gbps: float | None = None
    inter_latency_us: float | None = None

    def cluster(self, profile: Profile, world_size: int) -> Cluster:
        """The cluster; settings that are None are fitted to the profile's measured all-to-alls.

        Raises:
            UsageError: the profile has no usable link, and no bandwidth is given.
        """
        measured = fitted_level(profile.link, profile.model.ep_size)
        if measured is None and self.intra_gbps is None:
            raise UsageError(
                "the profile holds no measured all-to-all to take a bandwidth from: pass --intra-gbps, and "
                "--inter-gbps where there are several nodes"
            )
        base = measured or Level(1.0, 0.0)
        intra = Level(
            base.gbps if self.intra_gbps is None else self.intra_gbps,
            base.latency_us if self.intra_latency_us is None else self.intra_latency_us,
        )
        inter = Level(
            intra.gbps if self.inter_gbps is None else self.inter_gbps,
            intra.latency_us if self.inter_latency_us is None else self.inter_latency_us,
        )
        return Cluster(self.ranks_per_node or world_size, intra, inter)

    @property
    def is_as_measured(self) -> bool:
        """Whether all bandwidths and latencies are None."""
        return self == NetworkChoice(self.ranks_per_node)


@dataclass(frozen=True)
class Routing:
    """Distribution of routed rows: ``measured``, ``even``, or ``zipf`` with an exponent."""

    kind: str = "measured"
    exponent: float = 0.0

    def __str__(self) -> str:
        return f"zipf:{self.exponent:g}" if self.kind == "zipf" else self.kind

    def share(self, facts: ModelFacts, measured: Sequence[float], ep_size: int) -> tuple[float, ...]:
        """The share of each of ``ep_size`` ranks."""
        if self.kind == "even":
            return even_share(ep_size)
        if self.kind == "zipf":
            return merge_similar_shares(zipf_share(self.exponent, facts.num_experts, ep_size), _MAX_DISTINCT)
        if ep_size == facts.ep_size:
            return tuple(measured)
        return merge_similar_shares(rebinned_share(measured, ep_size), _MAX_DISTINCT)


@dataclass(frozen=True, kw_only=True)
class Forecast(StepEstimate):
    """The prediction of one plan in one layout; ``exposed_ms`` is the exposed time of the slowest stage's rank that
    waits longest.

    Attributes:
        plan: plan of the full model; segments end with pipeline stages.
        bubble_ms: time for which a step waits for other pipeline stages.
        gradient_ms: time for which a step waits for gradient reductions: by the ring model, or if they run during the
            backward pass, by simulation.
    """

    plan: Plan
    bubble_ms: float
    gradient_ms: float

    @property
    def exposed_share(self) -> float:
        """Part of the step for which compute waits for all-to-alls."""
        return self.exposed_ms / self.step_ms if self.step_ms else 0.0


@dataclass
class Forecaster:
    """Predicts steps of one profiled model in many layouts; simulations are cached.

    Attributes:
        profile: the measured profile.
        network: the network of the cluster.
    """

    profile: Profile
    network: NetworkChoice
    _seen: dict[object, tuple[Plan, Prediction]] = field(default_factory=dict)

    def layout(
        self,
        world_size: int,
        ep_size: int | None = None,
        pp_size: int | None = None,
        num_micro_batches: int | None = None,
        routing: Routing | None = None,
    ) -> Layout:
        """A layout in the network; values that are None are as profiled.

        Raises:
            UsageError: the layout is impossible.
        """
        facts = self.profile.model
        ep_size = ep_size or facts.ep_size
        per_node = self.network.ranks_per_node
        if per_node is not None and world_size > per_node and world_size % per_node:
            raise UsageError(
                f"--ranks-per-node {per_node} does not divide the {world_size} ranks: every node has equally many. "
                "Choose another number"
            )
        layout = Layout(
            world_size=world_size,
            ep_size=ep_size,
            pp_size=pp_size or len(set(facts.stage_of_layer)),
            num_micro_batches=num_micro_batches or facts.num_micro_batches,
            cluster=self._cluster_of_messages(world_size, ep_size),
            received_share=(routing or Routing()).share(facts, self.profile.received_share, ep_size),
        )
        check_layout(layout, self.profile)
        return layout

    def _cluster_of_messages(self, world_size: int, ep_size: int) -> Cluster | None:
        """The cluster, or None if measured times apply: no network settings, and groups of the measured size."""
        if self.network.is_as_measured and ep_size == self.profile.model.ep_size:
            return None
        return self.network.cluster(self.profile, world_size) if ep_size > 1 else None

    def forecast(self, layout: Layout, planner: Planner) -> Forecast:
        """Predicts a step in a layout.

        Raises:
            RecordError: the profile has no times for the plan.
        """
        moved = self.moved(layout)
        plan, prediction = self._predicted(moved, planner)
        gradient_ms, more_ms = prediction.gradient_ms, 0.0
        if self.profile.gradients is None:
            gradient_ms = self._gradient_ms(layout, self.network)
            # The measured rest includes the profiled run's reduction, which can't be larger than the rest.
            more_ms = gradient_ms - min(self._profiled_gradient_ms(), self.profile.rest_ms)
            if layout == self._profiled() and self.network.is_as_measured:
                more_ms = 0.0
        # Not in the measured rest, also where the profiled run had stages: that is the time outside of the first one.
        activations_ms = 2 * (layout.pp_size - 1) * self._activations_ms(layout)
        return Forecast(
            plan=plan,
            step_ms=prediction.step_ms + activations_ms + more_ms,
            exposed_ms=prediction.exposed_ms,
            bubble_ms=slots_of_bubble(moved.model.stage_of_layer) * prediction.slot_ms + activations_ms,
            gradient_ms=gradient_ms,
            peak_bytes=prediction.peak_bytes,
            peak_dw_bytes=prediction.peak_dw_bytes,
        )

    def moved(self, layout: Layout) -> Profile:
        """The profile as it would have been measured in a layout."""
        facts = self.profile.model
        same_ranks = layout.ranks_per_stage * len(set(facts.stage_of_layer)) == facts.world_size
        cluster = None
        if self.profile.gradients is not None and not (same_ranks and self.network.is_as_measured):
            cluster = self.network.cluster(self.profile, layout.world_size)
        return with_moved_reduction(self.profile, in_layout(self.profile, layout), layout, cluster)

    def dispatches(self, layout: Layout) -> tuple[Dispatch, ...]:
        """Dispatches that are possible in a layout."""
        return tuple(CostModel(self.moved(layout)).possible_dispatches())

    def _predicted(self, moved: Profile, planner: Planner) -> tuple[Plan, Prediction]:
        """The plan of a moved profile and its prediction; both are independent of the number of replicas."""
        alike = dataclasses.replace(moved, model=dataclasses.replace(moved.model, world_size=1))
        key = (planner, alike.model, alike.link, alike.received_share, alike.gradients)
        if key not in self._seen:
            plan = split_at_stages(planner(moved), moved.model.stage_of_layer)
            self._seen[key] = plan, Simulator(CostModel(moved)).predict(plan)
        return self._seen[key]

    def _profiled(self) -> Layout:
        facts = self.profile.model
        stages = len(set(facts.stage_of_layer))
        return Layout(
            facts.world_size, facts.ep_size, stages, facts.num_micro_batches, None, self.profile.received_share
        )

    def _profiled_gradient_ms(self) -> float:
        is_measured = fitted_level(self.profile.link, self.profile.model.ep_size) is not None
        return self._gradient_ms(self._profiled(), NetworkChoice() if is_measured else self.network)

    def _gradient_ms(self, layout: Layout, network: NetworkChoice) -> float:
        if layout.ranks_per_stage <= 1:
            return 0.0
        return gradient_ms(self.profile, layout, network.cluster(self.profile, layout.world_size))

    def _activations_ms(self, layout: Layout) -> float:
        """Time of one message between neighbouring stages: a micro-batch's hidden states."""
        if layout.pp_size == 1:
            return 0.0
        facts = self.profile.model
        num_bytes = facts.micro_batch_size * facts.seq_length * facts.combine_row_bytes
        return self.network.cluster(self.profile, layout.world_size).message_ms(num_bytes, layout.ranks_per_stage)


def no_overlap(profile: Profile) -> Plan:
    """Planner: stock Megatron's order."""
    return fixed_plan(1, DwPolicy.NONE)


def two_chunks(profile: Profile) -> Plan:
    """Planner: two chunks everywhere, along the batch where it has two samples."""
    dim = ChunkDim.BATCH if profile.model.micro_batch_size > 1 else ChunkDim.SEQUENCE
    return fixed_plan(2, chunk_dim=dim, chunk_multiple=profile.model.chunk_multiple(dim))


@dataclass(frozen=True)
class SweepRow:
    """The forecasts of all planners in one layout.

    Attributes:
        by_dispatch: forecasts of the same planner under each dispatch that is possible in the layout; empty if it was
            not asked for.
    """

    layout: Layout
    num_nodes: int
    forecasts: dict[str, Forecast]
    by_dispatch: dict[Dispatch, Forecast] = field(default_factory=dict)


def largest_ep_size(facts: ModelFacts, ranks_per_stage: int) -> int:
    """The largest EP size that divides the experts, and with expert tensor parallelism the ranks of a stage."""
    return max(
        size
        for size in range(1, facts.num_experts + 1)
        if facts.num_experts % size == 0 and (size == 1 or ranks_per_stage % (size * facts.expert_tp_size) == 0)
    )


def sweep(
    forecaster: Forecaster,
    layouts: Sequence[Layout],
    planners: dict[str, Planner],
    planner_of: Callable[[Dispatch], Planner] | None = None,
) -> Iterator[SweepRow]:
    """Yields one row per layout.

    Args:
        planner_of: the planner of each dispatch for :attr:`SweepRow.by_dispatch`; None leaves that empty.
    """
    by_dispatch = {} if planner_of is None else {one: planner_of(one) for one in Dispatch.known().values()}
    for layout in layouts:
        per_node = forecaster.network.ranks_per_node or layout.world_size
        yield SweepRow(
            layout,
            -(-layout.world_size // per_node),
            {name: forecaster.forecast(layout, planner) for name, planner in planners.items()},
            {
                dispatch: forecaster.forecast(layout, planner)
                for dispatch, planner in by_dispatch.items()
                if dispatch in forecaster.dispatches(layout)
            },
        )
