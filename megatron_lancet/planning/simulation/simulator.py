"""Predicts a plan's step on the machine of a profile: time, exposed communication, memory, and the timeline.

A micro-batch runs forward, then backward. Without pipeline parallelism a step is

    step_ms = num_micro_batches * micro_batch_ms + rest_ms

and with it the slowest stage determines the estimate:

    step_ms = (num_micro_batches + num_stages - 1) * slowest stage's (forward_ms + backward_ms) + rest_ms

The first formula is the second with one stage. All ranks start a micro-batch at the same time, after the slowest has
ended the one before. If the profile says how gradients are reduced during the backward pass, the reductions share the
links with the last micro-batch's all-to-alls (``shared_links.py``), and the step waits for their end.

With pairing a step is the first forward, num_micro_batches - 1 pairs and the last backward (``played.py``); with p
pipeline stages of v virtual ones, (p - 1) / v pairs more. All passes of warm-up and cool-down count as paired.

Memory is an upper bound: the activations of a stage (``kept_bytes.py``) plus the peak memory of deferred dWs.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.planning.profile import Profile, StepPace
from megatron_lancet.planning.simulation.buckets import Buckets
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.engine import Engine, Paces
from megatron_lancet.planning.simulation.kept_bytes import KeptBytes
from megatron_lancet.planning.simulation.links import Collectives, Links, Network, SerialLinks
from megatron_lancet.planning.simulation.lowering import BESIDE, Lowering, Step, backward
from megatron_lancet.planning.simulation.pairs import Passes, paired_steps
from megatron_lancet.planning.simulation.phase_result import MicroBatchKind, PhaseResult, Wait
from megatron_lancet.planning.simulation.played import Played, Stage
from megatron_lancet.planning.simulation.rows import Loads
from megatron_lancet.planning.simulation.shared_links import SharedLinks
from megatron_lancet.planning.stages import slots_of_bubble
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.dw_queue import AT_ONCE, DwRules
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import Plan, Segment
from megatron_lancet.schedule.timeline import RankTimeline


class PlanMismatch(RecordError):  # noqa: N818 - the name states the problem
    """The plan doesn't fit the model of the profile."""


@dataclass(frozen=True, kw_only=True)
class Prediction(StepEstimate):
    """An estimate by simulation.

    ``exposed_ms`` is the exposed time of the rank that waits longest. ``peak_bytes`` is an upper bound, without
    activations if the profile has no memory use.

    Attributes:
        forward_ms: forward time of one micro-batch on the slowest stage, that runs alone.
        backward_ms: its backward time.
        slot_ms: time of a micro-batch in the middle of a step: forward and backward, or with pairing one pair.
        exposed_forward_ms: the part of ``exposed_ms`` in the forward.
        num_early: number of dWs of a micro-batch that ran early because memory was full.
        floor_ms: step time if the backward had no exposed time, with the same forward.
        gradient_ms: time for which the step waits for gradient reductions after the last backward.
    """

    forward_ms: float
    backward_ms: float
    slot_ms: float
    exposed_forward_ms: float
    num_early: int
    floor_ms: float
    gradient_ms: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """A simulated step in detail.

    Attributes:
        stage: the pipeline stage whose ranks the timelines show.
        timelines: timelines of the simulated ranks, micro-batches one after the other. Their ``step_ms`` is the time of
            the whole step; the pipeline's filling and draining is not shown.
        waits: waits of one micro-batch, by timeline; with pairing the waits of one pair in the middle of the step.
        end_waits: with pairing, waits of the first forward and the last backward, by timeline; else empty.
        same_ranks: by timeline, the number of ranks of the group that it represents.
    """

    prediction: Prediction
    stage: int
    timelines: tuple[RankTimeline, ...]
    waits: tuple[tuple[Wait, ...], ...]
    end_waits: tuple[tuple[Wait, ...], ...]
    same_ranks: tuple[int, ...]

    def kinds(self, plan: Plan, num_micro_batches: int) -> list[MicroBatchKind]:
        """The kinds of micro-batches of the step: with pairing, those in the middle and those at the ends.

        Args:
            plan: the simulated plan.
            num_micro_batches: of a step.
        """
        if not plan.is_paired or num_micro_batches == 1:
            return [MicroBatchKind(plan.at_ends, self.waits, num_micro_batches)]
        middle = MicroBatchKind(plan.in_middle, self.waits, num_micro_batches - 1)
        return [middle, MicroBatchKind(plan.at_ends, self.end_waits, 1, is_at_end=True)]


MAX_PLAYED = 4
"""Most micro-batches of a paired step that are played if all are alike: the second pair is like all that follow."""
MAX_PLAYED_WITH_ENDS = 6
"""The same if those at the ends of the step are not: until the third pair the first one still has an effect."""


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
        self.kept = KeptBytes(costs)
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
            link.launch_ms,
        )
        self._forwards: dict[tuple[tuple[Segment, ...], Dispatch, bool], tuple[tuple[Stage, PhaseResult], ...]] = {}
        self._ends: dict[Plan, list[Played]] = {}

    def predict(self, plan: Plan) -> Prediction:
        """The figures of a step. Forward passes are cached by the plan's segments and dispatch.

        Raises:
            PlanMismatch: the plan is for another model.
            UnknownCost: something was not profiled.
        """
        return self._prediction(self._step(plan, False))

    def forget(self, segments: tuple[Segment, ...]) -> None:
        """Drops the cached forward passes of these segments."""
        for key in [key for key in self._forwards if key[0] == segments]:
            del self._forwards[key]

    def simulate(self, plan: Plan, stage_number: int | None = None) -> Simulation:
        """Simulates a step in detail; raises like :meth:`predict`.

        Args:
            stage_number: pipeline stage of the timelines; None for the slowest.
        """
        played = self._step(plan, True)
        prediction = self._prediction(played)
        shown = [part for part in played if stage_number in (None, part.stage.number)]
        part = max(shown, key=lambda part: part.slot_ms)
        simulated = self.loads.simulated
        columns = range(len(simulated))
        return Simulation(
            prediction,
            part.stage.number,
            tuple(RankTimeline(simulated[column], part.spans(column), prediction.step_ms) for column in columns),
            tuple(part.waits(column) for column in columns),
            tuple(part.end_waits(column) for column in columns),
            self.loads.same_ranks,
        )

    def expected_step(self, plan: Plan) -> StepEstimate:
        """Expected measured step; ``exposed_ms`` is the mean over ranks. Raises like :meth:`predict`.

        A simulation at an even pace is too fast: ranks drift apart from op to op, and at every all-to-all the faster
        one waits for the slower. So the plan is simulated with the pace of each layer and rank in each step whose paces
        the profile has, and the figures are medians over these. (dPRO replays traces of all ranks for the same reason.)
        The pace is even if the profile lacks the pace of any rank.
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
        played = self._step(plan, False, forward, backward)
        exposed_ms = max(statistics.fmean(part.exposed_ms(column)[0] for column in columns) for part in played)
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
        later_rules: Sequence[DwRules] = (),
        is_paired: bool = False,
    ) -> PhaseResult:
        """Simulates one phase; see :class:`~megatron_lancet.planning.simulation.engine.Engine`.

        Args:
            is_paired: whether the plan is: then all messages keep one order, and dispatches are not sent apart.
        """
        network = self._network
        keeps_one_order = is_paired and network.dispatches_apart
        if keeps_one_order:
            network = replace(network, dispatches_apart=False)
        is_shared = buckets is not None or (phase is Phase.FORWARD and network.dispatches_apart)
        unshared = SerialLinks if network.sends_share_link else Collectives
        links: Links = SharedLinks(network) if is_shared else unshared(network)
        inside_node = unshared(network)
        engine = Engine(links, inside_node, steps, phase, rules, record, paces, buckets, later_rules, keeps_one_order)
        return engine.run(start_ms)

    def start_ms(self) -> tuple[float, ...]:
        """Clocks of the simulated ranks at the start of a micro-batch."""
        return (0.0,) * len(self.loads.simulated)

    def _step(self, plan: Plan, record: bool, forward: Paces = (), backward: Paces = ()) -> list[Played]:
        """Plays what a step consists of, by stage. What plans share is cached unless it is recorded or paced."""
        if not plan.is_paired:
            return self._play_alone(plan, record, forward, backward, is_paired=False)
        if record or forward:
            ends = self._play_alone(plan.at_ends, record, forward, backward, is_paired=True)
        elif plan.at_ends in self._ends:
            ends = self._ends[plan.at_ends]
        else:
            ends = self._ends[plan.at_ends] = self._play_alone(plan.at_ends, False, (), (), is_paired=True)
        if self.model.num_micro_batches == 1:
            return ends
        kept = self.kept.in_pairs(plan)
        is_alike = plan.segments == plan.at_ends.segments
        middle = [part.stage for part in ends] if is_alike else self.stages(plan)
        paces = [
            {**of_backward, **{layer + BESIDE: factor for layer, factor in of_forward.items()}}
            for of_forward, of_backward in zip(forward, backward, strict=True)
        ]
        return [
            replace(self._play_pairs(plan, end, one, record, paces), saved_bytes=kept[one.number])
            for end, one in zip(ends, middle, strict=True)
        ]

    def _play_alone(self, plan: Plan, record: bool, forward: Paces, backward: Paces, is_paired: bool) -> list[Played]:
        """Plays a micro-batch that runs alone."""
        start_ms, rules = self.start_ms(), DwRules.of(plan)

        def forwards() -> Iterator[tuple[Stage, PhaseResult]]:
            for stage in self.stages(plan):
                yield (
                    stage,
                    self.play(
                        stage.forward, Phase.FORWARD, AT_ONCE, start_ms, record, paces=forward, is_paired=is_paired
                    ),
                )

        def play(stage: Stage, before: PhaseResult, buckets: Buckets | None) -> PhaseResult:
            steps, phase = stage.backward, Phase.INPUT_GRAD
            return self.play(steps, phase, rules, before.end_ms, record, buckets, backward, is_paired=is_paired)

        key = (plan.segments, plan.dispatch, is_paired and self._network.dispatches_apart)
        if record or forward:
            played = tuple(forwards())
        elif key in self._forwards:
            played = self._forwards[key]
        else:
            played = self._forwards[key] = tuple(forwards())
        count = self.model.num_micro_batches
        parts = []
        for stage, before in played:
            last = play(stage, before, stage.buckets)
            alike = last if stage.buckets is None or count == 1 else play(stage, before, None)
            parts.append(Played(stage, count, stage.saved_bytes, before, alike, last))
        return parts

    def _play_pairs(self, plan: Plan, end: Played, middle: Stage, record: bool, paces: Paces) -> Played:
        """Also plays the pairs of a step, or the first of them."""
        is_alike = end.stage is middle
        num_played = min(self.model.num_micro_batches, MAX_PLAYED if is_alike else MAX_PLAYED_WITH_ENDS)
        at_end, in_middle = (Passes(stage.forward, stage.backward) for stage in (end.stage, middle))
        steps = paired_steps([at_end, *[in_middle] * (num_played - 2), at_end])
        later = [DwRules.of(plan.in_middle)] * (num_played - 2)
        rules, phase = DwRules.of(plan.at_ends), Phase.INPUT_GRAD
        start_ms = end.forward.end_ms
        pairs = self.play(steps, phase, rules, start_ms, record, None, paces, later, is_paired=True)
        repeated = 2 if num_played == MAX_PLAYED_WITH_ENDS else min(1, num_played - 2)
        return replace(end, stage=middle, pairs=pairs, repeated=repeated)

    def stages(self, plan: Plan) -> list[Stage]:
        """The plan's steps by pipeline stage.

        Raises:
            PlanMismatch: the plan has other layers than the model, or a segment crosses stages, or the model can't use
                the plan's dispatch.
        """
        model, num_layers = self.model, len(self.model.layer_kinds)
        self._check_dispatch(plan.dispatch)
        forward: dict[int, list[Step]] = {stage: [] for stage in sorted(set(model.stage_of_layer))}
        first, last = model.stage_of_layer[0], model.stage_of_layer[-1]
        forward[first] += self.lowering.beside(OpKind.EMBEDDING)
        for segment in plan.segments:
            end = segment.last_layer or num_layers
            self._check(segment, end)
            stage = model.stage_of_layer[segment.first_layer - 1]
            layers = [(number, model.layer_kinds[number - 1]) for number in range(segment.first_layer, end + 1)]
            forward[stage] += self.lowering.forward(layers, segment, plan.dispatch)
        if (plan.segments[-1].last_layer or num_layers) != num_layers:
            raise PlanMismatch(f"the plan ends at layer {plan.segments[-1].last_layer}, the model has {num_layers}")
        forward[last] += self.lowering.beside(OpKind.HEAD)
        kept = self.kept.by_stage(plan.segments, plan.dispatch)
        stages = []
        for number, steps in forward.items():
            mirrored = tuple(backward(steps))
            stages.append(Stage(number, tuple(steps), mirrored, kept[number], Buckets.of(self.costs, mirrored)))
        return stages

    def _check_dispatch(self, dispatch: Dispatch) -> None:
        blocker = self.costs.blocker(dispatch)
        if blocker is not None:
            raise PlanMismatch(f"the plan's dispatch is {dispatch}, but {blocker.reason}; use {PLAIN}")

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

    def _prediction(self, played: Sequence[Played]) -> Prediction:
        model, rest_ms = self.model, self.costs.profile.rest_ms
        slowest = max(played, key=lambda part: part.slot_ms)
        num_ahead = slots_of_bubble(model.stage_of_layer)
        last_ms = max(part.last_end_ms for part in played)
        exposed_ms, exposed_forward_ms = max(map(slowest.exposed_ms, range(len(slowest.forward.end_ms))))
        floor = max(played, key=lambda part: part.floor_ms)
        return Prediction(
            step_ms=slowest.step_ms + num_ahead * slowest.slot_ms + (last_ms - slowest.end_ms) + rest_ms,
            forward_ms=max(slowest.forward.end_ms),
            backward_ms=slowest.end_ms - max(slowest.forward.end_ms),
            slot_ms=slowest.slot_ms,
            exposed_ms=exposed_ms,
            exposed_forward_ms=exposed_forward_ms,
            peak_dw_bytes=max(part.peak_dw_bytes for part in played),
            peak_bytes=max(part.saved_bytes + part.peak_dw_bytes for part in played),
            num_early=slowest.num_early,
            floor_ms=floor.floor_ms * (1 + num_ahead / model.num_micro_batches) + rest_ms,
            gradient_ms=min(part.last_end_ms - max(part.last.end_ms) for part in played if part.last_end_ms == last_ms),
        )


def simulate(profile: Profile, plan: Plan, shares: Sequence[float] | None = None) -> Simulation:
    """Simulates one step of ``plan`` on the machine of ``profile``.

    Args:
        shares: share of the group's routed rows that each rank receives; None for the profile's.

    Raises:
        RecordError: the plan, the profile and the shares don't fit together, or something was not profiled.
    """
    return Simulator(CostModel(profile), shares).simulate(plan)
