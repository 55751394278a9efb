"""A profile from the traces of an ordinary Megatron run."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_lancet.lab.from_trace.chunks import OpShares, cuts_of, weight_grads_with_chunks, with_chunks
from megatron_lancet.lab.from_trace.events import RankEvents, read_events
from megatron_lancet.lab.from_trace.facts import check_layout, layers_of_run, model_facts
from megatron_lancet.lab.from_trace.kernels import is_collective
from megatron_lancet.lab.from_trace.lacks import TraceLacks, damage_refused
from megatron_lancet.lab.from_trace.links import RankSteps, link_times
from megatron_lancet.lab.from_trace.packing import with_packing
from megatron_lancet.lab.from_trace.passes import stage_of
from megatron_lancet.lab.from_trace.step import TracedStep, expert_group, read_step
from megatron_lancet.planning.measured.op_times import OpKey, Samples, op_key, op_times, over_ranks, weight_grad_times
from megatron_lancet.planning.measured.pace import RankPaces, paces_of_rank, step_paces
from megatron_lancet.planning.profile import ChunkRouting, ModelFacts, Profile
from megatron_lancet.schedule.ops import FIRST_DISPATCHES, Op, Phase
from megatron_lancet.schedule.plan import ChunkDim, fixed_plan

_MIN_STEPS = 2
_BATCHED_PRODUCTS = frozenset({"aten::bmm", "aten::baddbmm"})
STOCK = "stock"
"""Name of the run's own step among the measured ones."""


def profile_from_traces(paths: Sequence[Path], slowdown: float | None = None) -> Profile:
    """Reads traces of one run into a profile.

    Args:
        paths: one or more of each rank that was recorded; one rank is enough.
        slowdown: factor by which a message slows down concurrent compute; None for what the kernels of messages take
            of a GPU's multiprocessors, and 1 on the CPU.

    Raises:
        TraceLacks: the traces lack something that a profile needs; the message says what, and how to record it.
        RecordError: a file can't be read, or is no trace.
    """
    traces: list[RankEvents] = []
    for path in paths:
        with damage_refused(path):
            traces.append(read_events(path))
            check_layout(traces[-1])
    ranks = {events.rank: events for events in reversed(traces)}
    with damage_refused(paths[0]):
        layers = layers_of_run(ranks)
    steps: defaultdict[int, list[TracedStep]] = defaultdict(list)
    for events in traces:
        with damage_refused(Path(events.path)):
            first_layers = layers.first_layers[stage_of(events)]
            steps[events.rank] += [read_step(events, step, first_layers) for step in events.steps]
    for rank, own in steps.items():
        if len(own) < _MIN_STEPS:
            raise TraceLacks(
                ranks[rank].path, f"{len(own)} step, where at least {_MIN_STEPS} are needed: the first is a warm-up"
            )
    first = min(ranks)
    with damage_refused(Path(ranks[first].path)):
        model = model_facts(ranks, {rank: own[0] for rank, own in steps.items()}, layers)
    if slowdown is None:
        slowdown = _slowdown(ranks[first])
    return _profile(model, ranks, steps, slowdown)


def _profile(model: ModelFacts, ranks: Mapping[int, RankEvents], steps: RankSteps, slowdown: float) -> Profile:
    plan = fixed_plan(1)
    link = link_times(ranks, steps, slowdown)
    samples: dict[int, Samples] = {}
    for rank, own in sorted(steps.items()):
        samples[rank] = Samples()
        for step in own:
            samples[rank].add(step, plan, model)
    medians = over_ranks([one.medians() for one in samples.values()], [stage_of(ranks[rank]) for rank in samples])
    groups = {rank: expert_group(events) for rank, events in ranks.items()}
    paces = [
        RankPaces(groups[rank][0], groups[rank].index(rank), paces_of_rank(one.steps, medians.op_ms, lambda _: 1.0))
        for rank, one in samples.items()
    ]
    ops, shares = op_times(medians, model), _shares(steps, model)
    first = min(ranks)
    if any(_sends_probabilities_apart(own[0]) for own in steps.values()):
        ops, shares = with_packing(ops, shares)
    whole, cuts = _whole_groups(groups, ranks), cuts_of(model, ranks.values())
    sender = next(rank for rank in sorted(steps) if _dispatched(steps[rank][0]))  # a stage may have no experts
    return Profile(
        model=model,
        device=ranks[first].device or "CPU",
        versions={},
        ops=with_chunks(ops, shares, model, cuts, _is_fused(steps[first][0])),
        weight_grads=weight_grads_with_chunks(weight_grad_times(medians, model), cuts),
        link=link,
        memory=(),
        rest_ms=round(medians.rest_ms, 4),
        received_share=_received_share(steps, whole) if whole else _sent_share(steps[sender]),
        measured_steps_ms={STOCK: round(max(_step_ms(own) for own in steps.values()), 4)},
        routing=_routing(steps, whole),
        paces=step_paces(paces, model.ep_size, len(model.layer_kinds)),
    )


def _step_ms(steps: Sequence[TracedStep]) -> float:
    return statistics.median(step.timeline.step_ms for step in steps)


def _slowdown(rank: RankEvents) -> float:
    """Compute kernels have the multiprocessors that messages do not take: a block of a message fills one."""
    if not rank.num_sms:
        return 1.0
    grids = [kernel.args.get("grid") for kernel in rank.kernels if is_collective(kernel)]
    blocks = max((int(grid[0]) for grid in grids if isinstance(grid, list) and grid), default=0)
    return rank.num_sms / max(1, rank.num_sms - blocks)


def _whole_groups(groups: Mapping[int, tuple[int, ...]], ranks: Mapping[int, RankEvents]) -> list[tuple[int, ...]]:
    """Of each pipeline stage an expert-parallel group all of whose ranks were recorded; empty if a stage has none."""
    of_stage: dict[int, tuple[int, ...]] = {}
    for group in sorted(set(groups.values())):
        if set(group) <= set(groups):
            of_stage.setdefault(stage_of(ranks[group[0]]), group)
    found = [of_stage[stage] for stage in sorted(of_stage)]
    return found if len(found) == len({stage_of(rank) for rank in ranks.values()}) else []


def _shares(steps: RankSteps, model: ModelFacts) -> dict[OpKey, OpShares]:
    totals: defaultdict[OpKey, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    plan = fixed_plan(1)
    for own in steps.values():
        for step in own:
            for name, parts in step.parts.items():
                op = Op.parse(name)
                if op.phase is not Phase.WEIGHT_GRAD:
                    total = totals[op_key(op, plan, model)]
                    for place, value in enumerate((parts.ms, parts.scaled_ms, parts.core_ms)):
                        total[place] += value
    found = {}
    for key, (ms, scaled_ms, core_ms) in totals.items():
        scaled = min(1.0, scaled_ms / ms) if ms > 0 else 0.0
        found[key] = OpShares(scaled, min(scaled, core_ms / ms if ms > 0 else 0.0))
    return found


def _sends_probabilities_apart(step: TracedStep) -> bool:
    return any(len(calls.dispatches) > 1 for forward in step.forwards for calls in forward.calls.values())


def _is_fused(step: TracedStep) -> bool:
    return not any(one.name in _BATCHED_PRODUCTS for one in step.batches[0].forward)


def _dispatched(step: TracedStep) -> dict[int, tuple[int, ...]]:
    """Rows to each rank in a step's first forward pass, by layer."""
    found: dict[int, tuple[int, ...]] = {}
    for sent in step.sent:
        op = Op.parse(sent.name)
        if op.phase is Phase.FORWARD and op.kind in FIRST_DISPATCHES:
            assert op.layer is not None
            found.setdefault(op.layer, sent.sent_rows)
    return found


def _received_share(steps: RankSteps, groups: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Share of the routed rows that each rank of a group receives, median over layers and steps."""
    shares: list[list[float]] = []
    for group in groups:
        for of_step in zip(*(steps[rank] for rank in group), strict=True):
            to = [_dispatched(step) for step in of_step]
            for layer in to[0]:
                received = [sum(rows) for rows in zip(*(of_rank[layer] for of_rank in to), strict=True)]
                shares.append([rows / max(1, sum(received)) for rows in received])
    return _medians(shares)


def _sent_share(steps: Sequence[TracedStep]) -> tuple[float, ...]:
    """The same from where one rank's rows go, as if all ranks sent as it does."""
    rows_to = [rows for step in steps for rows in _dispatched(step).values()]
    return _medians([[part / max(1, sum(rows)) for part in rows] for rows in rows_to])


def _medians(shares: Sequence[Sequence[float]]) -> tuple[float, ...]:
    medians = [statistics.median(of_rank) for of_rank in zip(*shares, strict=True)]
    return tuple(median / sum(medians) for median in medians)


def _routing(steps: RankSteps, groups: Sequence[Sequence[int]]) -> tuple[ChunkRouting, ...]:
    """Rows of an unchunked micro-batch, of the last step, by layer."""
    found = []
    for group in groups:
        to = [_dispatched(steps[rank][-1]) for rank in group]
        for layer in to[0]:
            rows = [of_rank[layer] for of_rank in to]
            found.append(
                ChunkRouting(
                    layer,
                    ChunkDim.BATCH,
                    1,
                    0,
                    sent=tuple(sum(own) - own[place] for place, own in enumerate(rows)),
                    received=tuple(map(sum, zip(*rows, strict=True))),
                )
            )
    return tuple(sorted(found, key=lambda one: one.layer))
