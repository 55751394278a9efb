"""Explains a plan layer by layer: what fills its gaps, which messages stay exposed, and why."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from megatron_lancet.planning.dispatch import with_dispatch
from megatron_lancet.planning.link_times import WIRES, wire_of
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.planner import Alternative, PlannedStep
from megatron_lancet.planning.search.search_space import Exclusion
from megatron_lancet.planning.simulation.buckets import REDUCTION
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.phase_result import MicroBatchKind, Wait
from megatron_lancet.planning.simulation.simulator import Prediction, Simulation, Simulator
from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import FIRST_DISPATCHES, Op, OpKind, Phase
from megatron_lancet.schedule.plan import DwPolicy, Plan, Segment
from megatron_lancet.schedule.timeline import Lane, Span

_SHOWN_MS = 5e-4
"""Exposed time below this is not listed."""


class Reason(StrEnum):
    """Why a message is waited for."""

    DEPENDENCY = "dependency"
    NO_DW = "no deferred weight gradients"
    NOTHING_LEFT = "nothing left to run"
    MEMORY = "memory"
    LINK = "link-bound"
    PEER = "another rank"
    COUNTS = "token counts"

    @property
    def description(self) -> str:
        """The reason as a clause, for readers who do not know the names."""
        return _IN_WORDS[self]


_IN_WORDS = {
    Reason.DEPENDENCY: "all remaining work needs a message that has not arrived",
    Reason.NO_DW: "the plan does not defer weight gradients, and nothing else is ready to run",
    Reason.NOTHING_LEFT: "every weight gradient that was ready has run",
    Reason.MEMORY: "the work that would fill the gap does not fit into memory",
    Reason.LINK: "the link is the bottleneck: it is busy with earlier messages, or for longer than compute takes",
    Reason.PEER: "another rank sends its part late",
    Reason.COUNTS: "the host waits for token counts, and the device has run all that was launched before",
}


@dataclass(frozen=True)
class Exposed:
    """A message that compute waits for.

    Attributes:
        op: name of the message's op.
        ms: exposed time in one micro-batch.
        reason: why it is not hidden.
    """

    op: str
    ms: float
    reason: Reason


@dataclass(frozen=True)
class Filled:
    """Weight gradients that run during the wait for a message.

    Attributes:
        op: name of the message's op.
        weight_grads: names of the dWs in the order in which they run.
    """

    op: str
    weight_grads: tuple[str, ...]


@dataclass(frozen=True)
class LayerExplanation:
    """One layer of a plan, on the rank of its stage that waits longest.

    The times are of one micro-batch. A paired plan has two for each layer: of a pair in the middle of
    the step (a backward, and the forward paired with it), and of the first forward and the last backward.

    Attributes:
        layer: global layer number.
        segment: how it is cut; its layers have no meaning here.
        exposed: exposed messages, ordered by time.
        filled: waits during which weight gradients run, ordered by time.
        num_times: how often in a step.
    """

    layer: int
    layer_kind: LayerKind
    stage: int
    segment: Segment
    exposed: tuple[Exposed, ...]
    filled: tuple[Filled, ...]
    num_times: int

    @property
    def exposed_ms(self) -> float:
        """Exposed time of the listed messages, once."""
        return sum(message.ms for message in self.exposed)


@dataclass(frozen=True)
class Explanation:
    """A plan in detail.

    Attributes:
        layers: layers in all micro-batches; of a paired plan with several micro-batches, those in the middle.
        ends: layers in the first forward and the last backward of a paired step; else empty.
        no_overlap: prediction without chunks and deferral; None if unknown.
        other_dispatches_ms: predicted step time of this plan with each other dispatch that the run can use.
        others: the alternatives of the search, see :class:`~megatron_lancet.planning.search.planner.Alternative`.
        excluded: parts of the search space that were not considered, and why.
    """

    plan: Plan
    prediction: Prediction
    num_micro_batches: int
    layers: tuple[LayerExplanation, ...]
    ends: tuple[LayerExplanation, ...]
    no_overlap: Prediction | None
    excluded: tuple[Exclusion, ...]
    others: tuple[Alternative, ...] = ()
    other_dispatches_ms: Mapping[Dispatch, float] = field(default_factory=dict)

    def exposed_by_reason(self) -> dict[Reason, float]:
        """Exposed time of a step by reason, longest first; one pair in the middle stands for all pairs."""
        total: dict[Reason, float] = {}
        for layer in (*self.layers, *self.ends):
            for message in layer.exposed:
                total[message.reason] = total.get(message.reason, 0.0) + message.ms * layer.num_times
        return dict(sorted(total.items(), key=lambda part: -part[1]))


def explain(profile: Profile, plan: Plan, planned: PlannedStep | None = None) -> Explanation:
    """Explains what a plan does on the machine of a profile, and why no more is hidden.

    Args:
        planned: result of the search that found the plan, for its alternatives and limits; None for none.

    Raises:
        RecordError: plan and profile don't fit together.
    """
    costs = CostModel(profile)
    simulator = Simulator(costs)
    layers: list[LayerExplanation] = []
    ends: list[LayerExplanation] = []
    num_micro_batches = costs.model.num_micro_batches
    for stage in sorted(set(costs.model.stage_of_layer)):
        simulation = simulator.simulate(plan, stage)
        reader = _StageReader(simulator, plan, simulation, planned)
        for kind in simulation.kinds(plan, num_micro_batches):
            (ends if kind.is_at_end else layers).extend(reader.layers(kind))
    return Explanation(
        plan=plan,
        prediction=simulator.predict(plan),
        num_micro_batches=num_micro_batches,
        layers=tuple(sorted(layers, key=lambda layer: layer.layer)),
        ends=tuple(sorted(ends, key=lambda layer: layer.layer)),
        no_overlap=planned.no_overlap if planned else None,
        excluded=planned.excluded if planned else (),
        others=planned.alternatives if planned else (),
        other_dispatches_ms=_other_dispatches_ms(simulator, plan),
    )


def _other_dispatches_ms(simulator: Simulator, plan: Plan) -> dict[Dispatch, float]:
    return {
        other: simulator.predict(with_dispatch(plan, other)).step_ms
        for other in simulator.costs.possible_dispatches()
        if other != plan.dispatch
    }


class _StageReader:
    """Explains the layers of one simulated stage, on the rank that waits longest."""

    def __init__(self, simulator: Simulator, plan: Plan, simulation: Simulation, planned: PlannedStep | None) -> None:
        self._model = simulator.model
        self._plan = plan
        self._stage = simulation.stage
        exposed_ms = [timeline.exposed_ms() for timeline in simulation.timelines]
        column = self._column = exposed_ms.index(max(exposed_ms))
        self._is_link_bound = {wire: _link_bound_phases(simulator, simulation, column, wire) for wire in WIRES}
        self._num_early = simulation.prediction.num_early
        self._lacks_memory = planned is not None and any(
            not other.fits and other.prediction.step_ms < planned.prediction.step_ms for other in planned.alternatives
        )

    def layers(self, kind: MicroBatchKind) -> Iterator[LayerExplanation]:
        """Yields the explanations of the stage's layers in micro-batches of a kind."""
        waits: dict[int, list[Wait]] = {}
        for wait in kind.waits[self._column]:
            layer = Op.parse(wait.name).layer
            assert layer is not None, wait.name
            waits.setdefault(layer, []).append(wait)
        for number, layer_kind in enumerate(self._model.layer_kinds, start=1):
            if self._model.stage_of_layer[number - 1] != self._stage:
                continue
            segment = kind.plan.segment_of(number)
            own = waits.get(number, [])
            yield LayerExplanation(
                number,
                layer_kind,
                self._stage,
                segment,
                tuple(
                    Exposed(wait.name, _exposed_ms(wait), self._reason(wait, segment))
                    for wait in own
                    if _exposed_ms(wait) > _SHOWN_MS
                ),
                tuple(Filled(wait.name, wait.filled) for wait in own if wait.filled),
                kind.num_times,
            )

    def _reason(self, wait: Wait, segment: Segment) -> Reason:
        half_ms = _exposed_ms(wait) / 2
        is_backward = not _is_forward(wait.name)
        if wait.peers_ms > wait.sent_ms and min(wait.peers_ms, wait.end_ms) - wait.exposed_from_ms >= half_ms:
            return Reason.PEER
        kind = Op.parse(wait.name).kind
        if kind == OpKind.COUNTS:
            return Reason.COUNTS
        # A forward dispatch also waits for its counts before it is sent; they don't occupy the link.
        waits_for_counts = not is_backward and kind in FIRST_DISPATCHES
        is_queued = not waits_for_counts and wait.sent_ms - max(wait.issued_ms, wait.exposed_from_ms) >= half_ms
        if is_queued or (segment.overlaps and self._is_link_bound[wire_of(kind)][is_backward]):
            return Reason.LINK
        defers = self._plan.dw_policy is DwPolicy.FILL
        if self._lacks_memory or (is_backward and defers and self._num_early):
            return Reason.MEMORY
        if is_backward and not defers:
            return Reason.NO_DW
        return Reason.NOTHING_LEFT if wait.filled else Reason.DEPENDENCY


def _link_bound_phases(simulator: Simulator, simulation: Simulation, column: int, wire: int) -> tuple[bool, bool]:
    """For forward and backward, whether some rank's messages take longer than the compute of the rank ``column``.

    Args:
        wire: the wire of the messages.
    """
    compute_ms = _ms_by_phase(
        (span, span.ms) for span in simulation.timelines[column].spans if span.lane is Lane.COMPUTE
    )
    link_ms = [_ms_by_phase(_message_times(simulator, timeline.spans, wire)) for timeline in simulation.timelines]
    return max(ms[0] for ms in link_ms) > compute_ms[0], max(ms[1] for ms in link_ms) > compute_ms[1]


def _message_times(simulator: Simulator, spans: Sequence[Span], wire: int) -> Iterator[tuple[Span, float]]:
    """Yields the messages of a wire, and their times alone on it."""
    for span in spans:
        if span.lane is Lane.COMM and not span.name.startswith(REDUCTION):
            kind = OpKind(Op.parse(span.name).kind)
            if wire_of(kind) == wire:
                yield span, simulator.costs.message_ms(span.num_bytes, kind)


def _ms_by_phase(spans: Iterable[tuple[Span, float]]) -> tuple[float, float]:
    """Sums of the times of forward and of backward spans."""
    total_ms = [0.0, 0.0]
    for span, ms in spans:
        total_ms[not _is_forward(span.name)] += ms
    return total_ms[0], total_ms[1]


def _exposed_ms(wait: Wait) -> float:
    return wait.end_ms - wait.exposed_from_ms


def _is_forward(name: str) -> bool:
    op = Op.find(name)
    return op is not None and op.phase is Phase.FORWARD
