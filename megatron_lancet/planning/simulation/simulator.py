"""Predicts a plan's step on the machine of a profile: time, exposed communication, memory, and the timeline.

A micro-batch runs forward, then backward. Without pipeline parallelism a step is

    step_ms = num_micro_batches * micro_batch_ms + rest_ms

and with it the slowest stage determines the estimate:

    step_ms = (num_micro_batches + num_stages - 1) * slowest stage's (forward_ms + backward_ms) + rest_ms

The first formula is the second with one stage. All ranks start a micro-batch at the same time, after the slowest has
ended the one before. If the profile says how gradients are reduced beside the backward pass, the reductions share the
links with the last micro-batch's all-to-alls (``shared_links.py``), and the step waits for their end. Memory is an
upper bound: all activations of a stage's micro-batches in flight (min(num_micro_batches, S - s) on stage s of S, as in
1F1B), plus the peak of what deferred dWs keep alive.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lancet.files import RecordError
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.planning.profile import Profile, StepPace
from megatron_lancet.planning.simulation.buckets import Buckets
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.engine import Engine, Paces
from megatron_lancet.planning.simulation.links import Collectives, Links, Network, SerialLinks
from megatron_lancet.planning.simulation.lowering import Loads, Lowering, Step, backward
from megatron_lancet.planning.simulation.phase_result import PhaseResult, Wait
from megatron_lancet.planning.simulation.shared_links import SharedLinks
from megatron_lancet.schedule.dw_queue import AT_ONCE, DwRules
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, Plan, Segment
from megatron_lancet.schedule.timeline import RankTimeline, Span


class PlanMismatch(RecordError):  # noqa: N818 - the name states the problem
    """The plan doesn't fit the model of the profile."""


@dataclass(frozen=True, kw_only=True)
class Prediction(StepEstimate):
    """An estimate by simulation.

    ``exposed_ms`` is that of the rank that waits longest. ``peak_bytes`` is an upper bound, without activations if the
    profile has no memory use.

    Attributes:
        forward_ms: forward time of one micro-batch on the slowest stage.
        backward_ms: its backward time.
        exposed_forward_ms: the part of ``exposed_ms`` in the forward.
        num_early: number of dWs of a micro-batch that ran early because memory was full.
        floor_ms: step time if the backward had no exposed time, with the same forward.
        gradient_ms: time for which the step waits for gradient reductions after the last backward.
    """

    forward_ms: float
    backward_ms: float
    exposed_forward_ms: float
    num_early: int
    floor_ms: float
    gradient_ms: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """A simulated step in detail.

    Attributes:
        stage: the pipeline stage whose ranks the timelines show.
        timelines: timelines of the simulated ranks, micro-batches one after the other. Their ``step_ms`` is that of the
            whole step; the pipeline's filling and draining is not shown.
        waits: waits of the first micro-batch, by timeline.
        same_ranks: by timeline, the number of ranks of the group that it represents.
    """

    prediction: Prediction
    stage: int
    timelines: tuple[RankTimeline, ...]
    waits: tuple[tuple[Wait, ...], ...]
    same_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """The steps of one pipeline stage.

    Attributes:
        saved_bytes: activations that the stage keeps of all micro-batches in flight.
        buckets: gradients that are reduced beside the last micro-batch's backward; None for none.
    """

    number: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    saved_bytes: int
    buckets: Buckets | None = None


class _Played(NamedTuple):
    """A simulated micro-batch of a stage; ``last`` is the last backward of a step, which reduces gradients."""

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
    """Simulates plans on one profile; forward passes and costs that plans share are cached."""

    def __init__(self, costs: CostModel, shares: Sequence[float] | None = None) -> None:
        """
        Args:
            shares: share of the group's routed rows that each rank receives, in all layers and chunks; None for the
                profile's routing, chunk by chunk if it has that.

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
            costs.counts_ms,
            link.sends_share_link,
            link.compute_slowdown,
            same_ranks,
            link.dispatches_apart,
            link.host_polls,
            link.slowdown(OpKind.PREPROCESS),
        )
        self._forwards: dict[tuple[Segment, ...], tuple[tuple[Stage, PhaseResult], ...]] = {}

    def predict(self, plan: Plan) -> Prediction:
        """The figures of a step. Forward passes are cached by the plan's segments.

        Raises:
            PlanMismatch: the plan is for another model.
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
        """Drops the cached forward passes of these segments."""
        self._forwards.pop(segments, None)

    def simulate(self, plan: Plan, stage_number: int | None = None) -> Simulation:
        """Simulates a step in detail; raises like :meth:`predict`.

        Args:
            stage_number: pipeline stage of the timelines; None for the slowest.
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
        """Expected measured step; ``exposed_ms`` is the mean over ranks. Raises like :meth:`predict`.

        A simulation at an even pace is too fast: ranks drift apart from op to op, and at every all-to-all the faster
        one waits for the slower. So the plan is simulated with the pace of each layer and rank in each traced step of
        the profile, and the figures are medians over these. (dPRO replays traces of all ranks for the same reason.)
        The pace is even if the profile has none, or not those of all ranks.
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
        """Step time and mean exposed time of ranks, in ms, at the pace of one traced step (of the simulated ranks)."""
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
        """Simulates one phase; see :class:`~megatron_lancet.planning.simulation.engine.Engine`."""
        links = self._links(phase, has_reductions=buckets is not None)
        return Engine(links, steps, phase, rules, record, paces, buckets).run(start_ms)

    def _links(self, phase: Phase, has_reductions: bool) -> Links:
        if has_reductions or (phase is Phase.FORWARD and self._network.dispatches_apart):
            return SharedLinks(self._network)
        return SerialLinks(self._network) if self._network.sends_share_link else Collectives(self._network)

    def start_ms(self) -> tuple[float, ...]:
        """Clocks of the simulated ranks at the start of a micro-batch."""
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
        """The plan's steps by pipeline stage.

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
        stages = []
        for number, steps in forward.items():
            mirrored = tuple(backward(steps))
            stages.append(Stage(number, tuple(steps), mirrored, kept[number], Buckets.of(self.costs, mirrored)))
        return stages

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
        if not self.costs.can_cut(segment.chunk_dim, segment.num_chunks, segment.chunk_multiple):
            raise PlanMismatch(
                f"the plan cuts layers {first} to {end} into {segment.num_chunks} chunks along {segment.chunk_dim}"
                + (f", multiples of {segment.chunk_multiple}" if segment.chunk_multiple > 1 else "")
                + f"; the profile's micro-batch has {model.micro_batch_size} samples of {model.seq_length} positions"
            )

    def saved_bytes(self, segments: Sequence[Segment]) -> int:
        """Bytes that the fullest pipeline stage keeps from forward to backward, without deferred dWs."""
        return max(self._kept_bytes(segments).values())

    def _kept_bytes(self, segments: Sequence[Segment]) -> dict[int, int]:
        """Bytes that each stage keeps of all its micro-batches in flight."""
        model, saved = self.model, self.costs.saved_bytes
        kept = {stage: self._kept_beside(stage) for stage in sorted(set(model.stage_of_layer))}
        for segment in segments:
            for number in range(segment.first_layer, (segment.last_layer or len(model.layer_kinds)) + 1):
                kind, stage = model.layer_kinds[number - 1], model.stage_of_layer[number - 1]
                kept[stage] += saved(kind, segment.chunk_dim, segment.num_chunks)
        return {stage: size * self._num_in_flight(stage) for stage, size in kept.items()}

    def _num_in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage keeps at a time."""
        return min(self.model.num_micro_batches, max(self.model.stage_of_layer) + 1 - stage)

    def room_for_layers(self, stage: int, room_bytes: int) -> int:
        """Bytes that a stage's layers may keep of one micro-batch if a rank has room for ``room_bytes``."""
        return room_bytes // self._num_in_flight(stage) - self._kept_beside(stage)

    def _kept_beside(self, stage: int) -> int:
        """Bytes that a stage keeps of one micro-batch beside its layers; an upper bound on a stage in the middle."""
        saved, stage_of = self.costs.saved_bytes, self.model.stage_of_layer
        num_projections = sum(stage_of[number - 1] == stage for number in self.model.mtp_layers)
        projection = saved(LayerKind.MTP, ChunkDim.BATCH, 1) if num_projections else 0
        return saved(LayerKind.NONE, ChunkDim.BATCH, 1) + num_projections * projection

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
    """Simulates one step of ``plan`` on the machine of ``profile``.

    Args:
        shares: share of the group's routed rows that each rank receives; None for the profile's.

    Raises:
        RecordError: the plan, the profile and the shares don't fit together, or something was not profiled.
    """
    return Simulator(CostModel(profile), shares).simulate(plan)
