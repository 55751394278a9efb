"""What the simulator makes of a plan, as a list of what the computing thread is to do, and the models it is for."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.dw_placement import best_fit_gaps
from megatron_lancet.planning.simulation.buckets import Buckets, Ledger, Reduction, WeightKind
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.lowering import Step
from megatron_lancet.planning.simulation.simulator import Simulation, Simulator
from megatron_lancet.schedule.dw_queue import AT_ONCE, DwQueue, DwRules
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import Compute, Launch, LaunchCounts, Op, OpKind, Phase, Wait
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.reductions import CommPriority, GradientReduction
from megatron_lancet.schedule.timeline import Lane
from tests.parity.mocked.recorded_run import (
    EP_SIZE,
    NUM_STAGES,
    PINNED_BYTES,
    Event,
    Model,
    Verb,
)

SHARED = {"moe_shared_expert_intermediate_size": 48}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mlp", "moe", "shared_experts"],
}
PADDED = {"moe_expert_capacity_factor": 0.75, "moe_pad_expert_input_to_capacity": True}
PIPELINE = (0, 1, 1, 1, 0, 1)
HYBRID = "E*-*E"
LAYERS_PER_STAGE = len(PIPELINE) // NUM_STAGES
MODELS = {
    "shared-experts": Model((1, 0, 1, 1), overrides=SHARED),
    "no-shared-experts": Model((0, 1, 1)),
    "full-recompute": Model((0, 1, 1), overrides={**SHARED, **FULL}),
    "selective-recompute": Model((0, 1, 1), overrides={**SHARED, **SELECTIVE}),
    "mtp": Model((0, 1), overrides={**SHARED, "mtp_num_layers": 2}),
    "mtp-repeated": Model(
        (0, 1), overrides={"mtp_num_layers": 2, "mtp_use_repeated_layer": True, "mtp_detach_heads": True}
    ),
    "padded": Model((0, 1, 1), overrides={**SHARED, **PADDED}),
    "two-nodes": Model((1, 0, 1), overrides=SHARED, nodes=Nodes(2, EP_SIZE // 2)),
    "hybrid": Model([kind == "E" for kind in HYBRID], overrides=SHARED, pattern=HYBRID),
    "wired-pairs": Model((1, 0, 1, 0), overrides=SHARED, is_wired=True),
    **{f"stage-{stage}": Model(PIPELINE, stage, SHARED) for stage in range(NUM_STAGES)},
}
"""Layers with experts and without in each of them; two experts a rank. Layers of the hybrid model have one part."""

SLOW_MS, MEDIUM_MS, FAST_MS = 1000.0, 2.5, 0.01
"""Of a message: all deferred dWs find it on its way, some do, or none. An op takes 1 ms, a dW 0.4 ms."""
OP_MS, DW_MS = 1.0, 0.4
ROOM_BYTES = 1


@dataclass(frozen=True)
class Case:
    """A plan to compare.

    Attributes:
        model: key of :data:`MODELS`.
        message_ms: that each message takes in the simulation.
        has_priority: all-to-alls go before gradient reductions.
        has_fitted_gaps: the plan gets the gaps that a planner gives it.
        host_polls: the host sees when a message arrives; not so with CUDA.
    """

    plan: Plan
    model: str = "shared-experts"
    message_ms: float = MEDIUM_MS
    has_priority: bool = False
    has_fitted_gaps: bool = False
    host_polls: bool = True

    @property
    def stage(self) -> int:
        return MODELS[self.model].stage or 0


def costs_of(case: Case, priority: CommPriority | None) -> CostModel:
    """What the profiler finds in the model, with times that decide how many dWs find a message on its way.

    Args:
        priority: of gradient reductions during the backward pass, one for each weight; None where there are none.
    """
    whole = case.model if MODELS[case.model].stage is None else "shared-experts"
    profile = MODELS[whole].profile
    if MODELS[case.model].stage is not None:
        profile = in_stages(profile)
    return CostModel(
        dataclasses.replace(
            profile,
            model=dataclasses.replace(profile.model, num_micro_batches=1),
            ops=tuple(dataclasses.replace(op, ms=OP_MS) for op in profile.ops),
            weight_grads=tuple(
                dataclasses.replace(grad, ms=DW_MS, pinned_bytes=PINNED_BYTES) for grad in profile.weight_grads
            ),
            link=dataclasses.replace(
                profile.link,
                all_to_all=((0, case.message_ms), (1, case.message_ms)),
                between_nodes=((0, case.message_ms), (1, case.message_ms)),
                between_nodes_queued=(),
                inside_node=((0, case.message_ms), (1, case.message_ms)),
                inside_node_queued=(),
                all_reduce=((0, FAST_MS), (1, FAST_MS)),
                queued=(),
                compute_slowdown=1.0,
                sends_share_link=case.host_polls,
                host_polls=case.host_polls,
            ),
            gradients=GradientReduction(2, 2, priority, bucket_bytes=1, chunk_bytes=20_000) if priority else None,
        )
    )


def in_stages(profile: Profile) -> Profile:
    """As a model with :data:`PIPELINE`'s layers would have been profiled."""
    facts = dataclasses.replace(
        profile.model,
        layer_kinds=tuple(LayerKind.MOE if has_experts else LayerKind.DENSE for has_experts in PIPELINE),
        stage_of_layer=tuple(layer // LAYERS_PER_STAGE for layer in range(len(PIPELINE))),
    )
    return dataclasses.replace(profile, model=facts)


def in_one_stage(costs: CostModel) -> CostModel:
    """The same layers where each weight may have a bucket of its own: later stages have no bucket size."""
    facts = dataclasses.replace(costs.model, stage_of_layer=(0,) * len(costs.model.layer_kinds))
    return CostModel(dataclasses.replace(costs.profile, model=facts))


@dataclass(frozen=True)
class Lowered:
    """What the simulator makes of a plan.

    Attributes:
        plan: with the gaps that it got.
        counts: names of the messages with token counts.
        steps: by phase.
        weight_grads: ends of ops, waits and weight gradients of the backward.
        num_filled: dWs that found a message on its way, by the message's name; None if the host doesn't see that.
        reports: waits and reports of the backward.
        places: waits and starts of reductions, if there always is one that could start.
    """

    plan: Plan
    counts: frozenset[str]
    steps: dict[Phase, list[Event]]
    weight_grads: list[Event]
    num_filled: dict[str, int] | None
    reports: list[Event]
    places: list[Event]


def lowered(case: Case) -> Lowered:
    costs = costs_of(case, CommPriority.ALL_TO_ALL_FIRST if case.has_priority else None)
    # Even shares: all ranks of the group behave like the one that runs.
    simulator = Simulator(costs, (1 / EP_SIZE,) * EP_SIZE)
    plan = case.plan
    if case.has_fitted_gaps:
        plan = dataclasses.replace(plan, gaps=best_fit_gaps(simulator, plan))
        assert plan.gaps
    stage = simulator.stages(plan)[case.stage]
    simulation = simulator.simulate(plan, case.stage)
    return Lowered(
        plan,
        frozenset(event_of(step, Phase.FORWARD).name for step in stage.forward if step[0] is LaunchCounts),
        {
            Phase.FORWARD: [event_of(step, Phase.FORWARD) for step in stage.forward],
            Phase.INPUT_GRAD: [event_of(step, Phase.INPUT_GRAD) for step in stage.backward],
        },
        played_backward(simulation),
        {wait.name: len(wait.filled) for wait in simulation.waits[0]} if case.host_polls else None,
        list(reports_of(stage.backward, in_one_stage(costs_of(case, CommPriority.OFF)), DwRules.of(plan))),
        list(places_of(stage.backward)),
    )


VERBS = {Compute: Verb.END, LaunchCounts: Verb.ISSUE, Launch: Verb.ISSUE, Wait: Verb.WAIT}


def event_of(step: Step, phase: Phase) -> Event:
    verb, layer, action = step
    name = str(Op(layer, action.chunk, phase, action.kind, action.tile)) if layer else f"{phase}.{action.kind}"
    return Event(VERBS[verb], name)


def played_backward(simulation: Simulation) -> list[Event]:
    """Ends of ops, waits and weight gradients, by the simulated clock; a wait that is over comes behind what ended."""
    events = []
    for span in simulation.timelines[0].spans:
        phase = phase_of(span.name)
        if span.lane is Lane.COMPUTE and phase is not Phase.FORWARD:
            verb = Verb.WEIGHT_GRAD if phase is Phase.WEIGHT_GRAD else Verb.END
            events.append((span.end_ms, 0, Event(verb, span.name)))
    for wait in simulation.waits[0]:
        if phase_of(wait.name) is Phase.INPUT_GRAD:
            events.append((wait.end_ms, 1, Event(Verb.WAIT, wait.name)))
    return [event for _, _, event in sorted(events, key=lambda event: event[:2])]


def reports_of(backward: Sequence[Step], costs: CostModel, rules: DwRules) -> Iterator[Event]:
    """Waits, and reports of weights that each have a bucket of their own: it is reduced when they are reported."""
    buckets = Buckets.of(costs, backward)
    assert buckets is not None
    weights = {buckets.reductions[bucket].name: weight for weight, bucket in buckets.bucket_of.items()}
    queue: DwQueue = DwQueue(rules)
    ledger = Ledger(buckets, queue)

    def reported(reductions: Sequence[Reduction]) -> Iterator[Event]:
        for reduction in reductions:
            layer, name = weights[reduction.name]
            yield Event(Verb.REPORT, str(Op.weight_grad(layer or None, name)))

    for step in backward:
        verb, layer, action = step
        if verb is Compute:
            for cost in action.weight_grads[0]:
                yield from reported(ledger.put((layer - cost.layers_back, cost.name)))
        elif verb is Launch:
            ledger.issue()
        else:
            yield event_of(step, Phase.INPUT_GRAD)
            queue.advance_window()
            yield from reported(ledger.advance(action.kind))
    yield from reported(ledger.end())


def places_of(backward: Sequence[Step]) -> Iterator[Event]:
    """Waits, and starts of reductions of which one becomes ready with each message, and one fits into a place."""
    num_messages = sum(verb is Launch for verb, _, _ in backward)
    weights = [(0, str(index)) for index in range(num_messages)]
    tokens = Buckets(
        bucket_of={weight: index for index, weight in enumerate(weights)},
        num_weights=(1,) * num_messages,
        reductions=(Reduction("", WeightKind.DENSE, 0.0, ROOM_BYTES),) * num_messages,
        first_reduction=tuple(range(num_messages + 1)),
        num_puts=dict.fromkeys(weights, 1),
        late=frozenset(),
        num_all_to_alls=num_messages,
        chunk_bytes=ROOM_BYTES,
    )
    ledger = Ledger(tokens, DwQueue(AT_ONCE))
    for step in backward:
        starting: list[Reduction] = []
        if step[0] is Launch:
            ledger.issue()
            starting = ledger.put(weights.pop())
        elif step[0] is Wait:
            yield event_of(step, Phase.INPUT_GRAD)
            starting = ledger.advance(step[2].kind)
        yield from (Event(Verb.REDUCE, "") for _ in starting)
    assert not ledger.end()


def phase_of(name: str) -> Phase | None:
    """None for a gradient reduction."""
    op = Op.find(name)
    return None if op is None else op.phase


def is_cut(name: str) -> bool:
    op = Op.find(name)
    return op is not None and op.kind == OpKind.CUT
