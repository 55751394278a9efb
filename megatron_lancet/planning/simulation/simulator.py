"""What a plan would do on a profile's machine: time of a step, exposed communication, memory, and the timeline.

A micro-batch runs forward, then backward. Without pipeline parallelism a step is

    step_ms = num_micro_batches * micro_batch_ms + rest_ms

and with it an estimate, where the slowest stage sets the pace:

    step_ms = (num_micro_batches + num_stages - 1) * slowest stage's (forward_ms + backward_ms) + rest_ms

Both are one formula. Every micro-batch starts on all ranks at once: what ranks drift apart in one is waited for at its
end. Where the profile says how gradients are reduced beside the backward pass, the last micro-batch's all-to-alls
share the links with that (``shared_links.py``), and the step waits for what is left of it. Memory is an upper bound:
everything that a stage's layers keep of the micro-batches that it has in flight (stage s of S has
min(num_micro_batches, S - s), as in 1F1B), plus the peak of what deferred dWs keep alive.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lancet.files import RecordError
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.planning.profile import LayerKind, Profile, StepPace
from megatron_lancet.planning.simulation.buckets import Buckets
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.engine import Engine, Paces, PhaseResult, Wait
from megatron_lancet.planning.simulation.links import Collectives, Links, Network, SerialLinks
from megatron_lancet.planning.simulation.lowering import Loads, Lowering, Step, backward
from megatron_lancet.planning.simulation.shared_links import SharedLinks
from megatron_lancet.schedule.dw_queue import AT_ONCE, DwRules
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, Plan, Segment
from megatron_lancet.schedule.timeline import RankTimeline, Span


class PlanMismatch(RecordError):  # noqa: N818 - says what is the matter
    """A plan doesn't fit the profile's model: what was expected, what is there."""


@dataclass(frozen=True, kw_only=True)
class Prediction(StepEstimate):
    """An estimate by simulation.

    Its ``exposed_ms`` is of the rank that waits longest. ``peak_bytes`` is bounded as the module says, without
    activations where the profile knows no memory.

    Attributes:
        forward_ms: of one micro-batch, on the slowest stage.
        backward_ms: the same.
        exposed_forward_ms: the part of ``exposed_ms`` in the forward.
        num_early: dWs of a micro-batch that ran early because their memory was full.
        floor_ms: the step if the backward never stood still, after the same forward.
        gradient_ms: of the step, standing still for gradient reductions when the last backward has ended.
    """

    forward_ms: float
    backward_ms: float
    exposed_forward_ms: float
    num_early: int
    floor_ms: float
    gradient_ms: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """A step in detail.

    Attributes:
        prediction: its figures.
        stage: the pipeline stage whose ranks the timelines show.
        timelines: of the simulated ranks, micro-batches one after the other; under pipeline parallelism ``step_ms`` of
            a timeline is the step's, and the pipeline's filling and draining is not drawn.
        waits: of the first micro-batch, by timeline.
        same_ranks: by timeline, how many ranks of the group behave like it.
    """

    prediction: Prediction
    stage: int
    timelines: tuple[RankTimeline, ...]
    waits: tuple[tuple[Wait, ...], ...]
    same_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """Layers of one pipeline stage, in runs of neighbours, and the order of their ops.

    Attributes:
        saved_bytes: that the stage keeps, of all micro-batches in flight.
        buckets: gradients that are reduced beside the last micro-batch's backward.
    """

    number: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    saved_bytes: int
    buckets: Buckets | None = None


class _Played(NamedTuple):
    """A stage's micro-batch; ``last`` is the backward of a step's last one, in which gradients are reduced."""

    stage: Stage
    forward: PhaseResult
    backward: PhaseResult
    last: PhaseResult

    @property
    def end_ms(self) -> float:
        return max(self.backward.end_ms)

    @property
    def last_end_ms(self) -> float:
        return max(*self.last.end_ms, self.last.reduced_ms)


class Simulator:
    """Simulates plans on one profile; what plans have in common is made once."""

    def __init__(self, costs: CostModel, shares: Sequence[float] | None = None) -> None:
        """
        Args:
            shares: of the group's routed rows that each rank receives, alike in all layers and chunks; None takes what
                the profile saw, chunk by chunk where it has that.

        Raises:
            RecordError: the shares don't fit the group.
        """
        self.costs = costs
        self.model = costs.model
        self.loads = Loads.measured(costs.profile) if shares is None else Loads.of(costs.model, shares)
        self.lowering = Lowering(costs, self.loads)
        link = costs.profile.link
        same_ranks = self.loads.same_ranks
        self._network = Network(
            costs.counts_ms, link.sends_share_link, link.compute_slowdown, same_ranks, link.dispatches_apart
        )
        self._forwards: dict[tuple[Segment, ...], tuple[tuple[Stage, PhaseResult], ...]] = {}

    def predict(self, plan: Plan) -> Prediction:
        """Figures only. Forward passes are remembered by the plan's segments.

        Raises:
            PlanMismatch: the plan is of another model.
            UnknownCost: something was not profiled.
        """
        segments = tuple(plan.segments)
        if segments not in self._forwards:
            stages = self.stages(plan)
            self._forwards[segments] = tuple((stage, self._play_forward(stage, False)) for stage in stages)
        rules = DwRules.of(plan)
        return self._prediction(
            [self._play_backward(stage, forward, rules, False) for stage, forward in self._forwards[segments]]
        )

    def forget(self, segments: tuple[Segment, ...]) -> None:
        """Free what :meth:`predict` remembers of these."""
        self._forwards.pop(segments, None)

    def simulate(self, plan: Plan, stage_number: int | None = None) -> Simulation:
        """In detail; raises like :meth:`predict`.

        Args:
            stage_number: the pipeline stage whose timelines are wanted; None for the slowest.
        """
        rules = DwRules.of(plan)
        played = [
            self._play_backward(stage, self._play_forward(stage, True), rules, True) for stage in self.stages(plan)
        ]
        prediction = self._prediction(played)
        shown = [part for part in played if stage_number in (None, part.stage.number)]
        stage, forward, result, last = max(shown, key=lambda part: part.end_ms)
        simulated = self.loads.simulated
        timelines = []
        for column, rank in enumerate(simulated):
            alike, spans = (forward.spans[column] + one.spans[column] for one in (result, last))
            timelines.append(RankTimeline(rank, self._repeated(alike, spans, max(result.end_ms)), prediction.step_ms))
        return Simulation(
            prediction,
            stage.number,
            tuple(timelines),
            tuple(forward.waits[column] + result.waits[column] for column in range(len(simulated))),
            self.loads.same_ranks,
        )

    def expected_step(self, plan: Plan) -> StepEstimate:
        """What a clock would show: ``exposed_ms`` is the mean over ranks. Raises like :meth:`predict`.

        A simulation at an even pace is too fast. Ranks drift apart from op to op, and at every all-to-all the faster
        one waits for the slower. So the plan is also played with each layer as fast, on each rank, as it was in traced
        steps of the profile; the figures are medians over these. (dPRO replays traces of all ranks for the same
        reason.) The pace is even where the profile has none, or not those of all ranks.
        """
        profile, num_ranks = self.costs.profile, len(self.loads.simulated)
        even = self.predict(plan)
        paces = [pace for pace in profile.paces if len(pace.forward[0]) == num_ranks == self.model.ep_size]
        if paces:
            steps, exposed = zip(*(self._paced(plan, pace) for pace in paces), strict=True)
            step_ms, exposed_ms = statistics.median(steps), statistics.median(exposed)
        else:
            simulation = self.simulate(plan)
            waits_ms = [
                timeline.exposed_ms()
                for timeline, same in zip(simulation.timelines, simulation.same_ranks, strict=True)
                for _ in range(same)
            ]
            step_ms, exposed_ms = even.step_ms, statistics.fmean(waits_ms)
        return StepEstimate(step_ms, exposed_ms, even.peak_bytes, even.peak_dw_bytes)

    def _paced(self, plan: Plan, pace: StepPace) -> tuple[float, float]:
        """Step time and exposed time, mean over ranks, in ms, if all micro-batches' ops took as long as in one step.

        Args:
            pace: of as many ranks as are simulated.
        """
        columns = range(len(self.loads.simulated))
        forward, backward = (
            [{layer: ranks[column] for layer, ranks in enumerate(layers)} for column in columns]
            for layers in (pace.forward, pace.backward)
        )
        played = [
            self._play_backward(stage, self._play_forward(stage, False, forward), DwRules.of(plan), False, backward)
            for stage in self.stages(plan)
        ]
        before, after, last = (
            max(statistics.fmean(getattr(part, name).exposed_ms) for part in played)
            for name in ("forward", "backward", "last")
        )
        exposed_ms = (before + after) * self.model.num_micro_batches + (last - after)
        return self._prediction(played).step_ms, exposed_ms

    def play(
        self,
        steps: Sequence[Step],
        phase: Phase,
        rules: DwRules,
        start_ms: Sequence[float],
        record: bool = False,
        buckets: Buckets | None = None,
        paces: Paces = (),
    ) -> PhaseResult:
        """One phase of an order of ops.

        Args:
            buckets: gradients that are reduced beside it.
            paces: of the ranks; empty for an even one.
        """
        links = self._links(phase, has_reductions=buckets is not None)
        return Engine(links, steps, phase, rules, record, paces, buckets).run(start_ms)

    def _links(self, phase: Phase, has_reductions: bool) -> Links:
        if has_reductions or (phase is Phase.FORWARD and self._network.dispatches_apart):
            return SharedLinks(self._network, phase)
        return SerialLinks(self._network) if self._network.sends_share_link else Collectives(self._network)

    def start_ms(self) -> tuple[float, ...]:
        """Clocks of the simulated ranks when a micro-batch starts."""
        return (0.0,) * len(self.loads.simulated)

    def _play_forward(self, stage: Stage, record: bool, paces: Paces = ()) -> PhaseResult:
        return self.play(stage.forward, Phase.FORWARD, AT_ONCE, self.start_ms(), record, paces=paces)

    def _play_backward(
        self, stage: Stage, forward: PhaseResult, rules: DwRules, record: bool, paces: Paces = ()
    ) -> _Played:
        def play(buckets: Buckets | None) -> PhaseResult:
            return self.play(stage.backward, Phase.INPUT_GRAD, rules, forward.end_ms, record, buckets, paces)

        last = play(stage.buckets)
        is_alike = stage.buckets is None or self.model.num_micro_batches == 1
        return _Played(stage, forward, last if is_alike else play(None), last)

    def stages(self, plan: Plan) -> list[Stage]:
        """The plan's ops by pipeline stage.

        Raises:
            PlanMismatch: the plan has other layers than the model, or a segment crosses stages.
        """
        model, num_layers = self.model, len(self.model.layer_kinds)
        forward: dict[int, list[Step]] = {stage: [] for stage in sorted(set(model.stage_of_layer))}
        first, last = model.stage_of_layer[0], model.stage_of_layer[-1]
        forward[first] += self.lowering.beside(OpKind.EMBEDDING)
        for segment in plan.segments:
            end = segment.last_layer or num_layers
            self._check(segment, end)
            stage = model.stage_of_layer[segment.first_layer - 1]
            layers = [(number, model.layer_kinds[number - 1]) for number in range(segment.first_layer, end + 1)]
            forward[stage] += self.lowering.forward(layers, segment)
        if (plan.segments[-1].last_layer or num_layers) != num_layers:
            raise PlanMismatch(f"the plan ends at layer {plan.segments[-1].last_layer}, the model has {num_layers}")
        forward[last] += self.lowering.beside(OpKind.HEAD)
        kept = self._kept_bytes(plan.segments)
        return [self._stage(number, steps, kept[number]) for number, steps in forward.items()]

    def _stage(self, number: int, forward: Sequence[Step], kept_bytes: int) -> Stage:
        steps = tuple(backward(forward))
        return Stage(number, tuple(forward), steps, kept_bytes, Buckets.of(self.costs, steps))

    def _check(self, segment: Segment, end: int) -> None:
        model, first = self.model, segment.first_layer
        if end > len(model.layer_kinds) or first > len(model.layer_kinds):
            raise PlanMismatch(f"the plan has a layer {max(end, first)}, the model has {len(model.layer_kinds)}")
        stages = set(model.stage_of_layer[first - 1 : end])
        if len(stages) > 1:
            raise PlanMismatch(
                f"layers {first} to {end} are one segment of the plan but on pipeline stages {sorted(stages)}; "
                "end a segment with each stage"
            )
        if not self.costs.can_cut(segment.chunk_dim, segment.num_chunks):
            raise PlanMismatch(
                f"the plan cuts layers {first} to {end} into {segment.num_chunks} chunks along {segment.chunk_dim}; "
                f"the profile's micro-batch has {model.micro_batch_size} samples of {model.seq_length} positions"
            )

    def saved_bytes(self, segments: Sequence[Segment]) -> int:
        """What the fullest pipeline stage keeps from forward to backward, without deferred dWs."""
        return max(self._kept_bytes(segments).values())

    def _kept_bytes(self, segments: Sequence[Segment]) -> dict[int, int]:
        """By stage, of all micro-batches that it has in flight."""
        model, saved = self.model, self.costs.saved_bytes
        beside = saved(LayerKind.NONE, ChunkDim.BATCH, 1)
        kept = dict.fromkeys(sorted(set(model.stage_of_layer)), beside)
        for segment in segments:
            for number in range(segment.first_layer, (segment.last_layer or len(model.layer_kinds)) + 1):
                kind, stage = model.layer_kinds[number - 1], model.stage_of_layer[number - 1]
                kept[stage] += saved(kind, segment.chunk_dim, segment.num_chunks)
        return {stage: size * self._num_in_flight(stage) for stage, size in kept.items()}

    def _num_in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage keeps at a time."""
        return min(self.model.num_micro_batches, max(self.model.stage_of_layer) + 1 - stage)

    def room_for_layers(self, stage: int, room_bytes: int) -> int:
        """What a stage's layers may keep of one micro-batch where a rank has room for ``room_bytes``."""
        beside = self.costs.saved_bytes(LayerKind.NONE, ChunkDim.BATCH, 1)
        return room_bytes // self._num_in_flight(stage) - beside

    def _prediction(self, played: Sequence[_Played]) -> Prediction:
        model, rest_ms = self.model, self.costs.profile.rest_ms
        slowest = max(played, key=lambda part: part.end_ms)
        num_stages = max(model.stage_of_layer) + 1
        num_slots = model.num_micro_batches + num_stages - 1
        floors = (
            end - exposed
            for part in played
            for end, exposed in zip(part.backward.end_ms, part.backward.exposed_ms, strict=True)
        )
        times = zip(slowest.forward.exposed_ms, slowest.backward.exposed_ms, slowest.last.exposed_ms, strict=True)
        exposed_ms, exposed_forward_ms = max(
            ((before + after) * model.num_micro_batches + (last - after), before * model.num_micro_batches)
            for before, after, last in times
        )
        last_ms = max(part.last_end_ms for part in played)
        return Prediction(
            step_ms=num_slots * slowest.end_ms + (last_ms - slowest.end_ms) + rest_ms,
            forward_ms=max(slowest.forward.end_ms),
            backward_ms=slowest.end_ms - max(slowest.forward.end_ms),
            exposed_ms=exposed_ms,
            exposed_forward_ms=exposed_forward_ms,
            peak_dw_bytes=max(max(part.last.peak_dw_bytes) for part in played),
            peak_bytes=max(part.stage.saved_bytes + max(part.last.peak_dw_bytes) for part in played),
            num_early=max(slowest.last.num_early),
            floor_ms=num_slots * max(floors) + rest_ms,
            gradient_ms=min(part.last_end_ms - max(part.last.end_ms) for part in played if part.last_end_ms == last_ms),
        )

    def _repeated(self, alike: Sequence[Span], last: Sequence[Span], micro_batch_ms: float) -> tuple[Span, ...]:
        """Spans of all micro-batches, ordered by start."""
        num_alike = self.model.num_micro_batches - 1
        first, end = (sorted(spans, key=lambda span: (span.start_ms, span.end_ms)) for spans in (alike, last))
        return tuple(
            Span(s.name, s.lane, s.start_ms + shift_ms, s.end_ms + shift_ms, s.num_bytes)
            for shift_ms, spans in [
                *((index * micro_batch_ms, first) for index in range(num_alike)),
                (num_alike * micro_batch_ms, end),
            ]
            for s in spans
        )


def simulate(profile: Profile, plan: Plan, shares: Sequence[float] | None = None) -> Simulation:
    """One step of ``plan`` on the machine of ``profile``.

    Args:
        shares: of the group's routed rows that each rank receives; None takes the profile's.

    Raises:
        RecordError: the plan, the profile and the shares don't fit together, or something was not profiled.
    """
    return Simulator(CostModel(profile), shares).simulate(plan)
