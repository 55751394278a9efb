"""Profiles a run while it trains: traces some steps under several plans, then returns the same profile on all ranks.

    run = ProfileRun(model, plans)
    for index, plan in enumerate(run.plans):
        ...switch all ranks to plan...
        with run.step(index):
            ...a training step...
    profile = run.finish()

Plans don't change what a step computes, so these are ordinary training steps.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lancet.planning.link_times import LinkTimes
from megatron_lancet.planning.measured.op_times import (
    OpMedians,
    Samples,
    launch_bound_ms,
    op_key,
    op_times,
    over_ranks,
    weight_grad_times,
)
from megatron_lancet.planning.measured.pace import RankPaces, paces_of_rank, step_paces, typical_steps
from megatron_lancet.planning.profile import MemoryUse, Profile
from megatron_lancet.planning.simulation.curve import Curve
from megatron_lancet.profiler.expert_load import ExpertRows, gathered_load
from megatron_lancet.profiler.facts import ProfiledModel, key_of
from megatron_lancet.profiler.links import Link, Wires, measure_links
from megatron_lancet.profiler.memory import SavedActivations
from megatron_lancet.profiler.routing import (
    ChunkKey,
    RankRouting,
    chunk_routing,
    layer_of,
    received_shares,
    rows_of_step,
)
from megatron_lancet.profiler.slowdown import ChunkSizes
from megatron_lancet.runtime.collectives import from_all_ranks, from_rank_0
from megatron_lancet.runtime.trace import RoutedRows, StepTrace, Trace
from megatron_lancet.schedule.chunk_sizes import most_chunks, multiple_along
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import BETWEEN_NODES, INSIDE_NODE, Op, OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, fixed_plan
from megatron_lancet.schedule.timeline import Lane, Span

NUM_TRACED_STEPS = 3
"""Traced steps of each plan. Medians go over them, over all layers and all micro-batches."""
_CHUNK_COUNTS = (2, 4)
_PROFILED_TILES = 2
MIN_TOKENS_OF_CHUNK = 16
"""With fewer tokens, launching an op costs more than its work, so such a plan is not worth profiling."""

_Rank = tuple[OpMedians, dict[str, float], list[MemoryUse], RankRouting]
"""Measurements of a rank: ops, step times by plan, memory, routing."""


def plans_to_profile(
    micro_batch_size: int,
    seq_length: int,
    dims: Sequence[ChunkDim] = (ChunkDim.BATCH, ChunkDim.SEQUENCE),
    overlap_range: OverlapRange = OverlapRange.STACK,
    chunk_counts: Sequence[int] = _CHUNK_COUNTS,
    token_multiple: int = 1,
    dispatches: Sequence[Dispatch] = (),
    has_tiles: bool = False,
) -> list[Plan]:
    """Returns plans whose ops together give the costs of any plan: unchunked micro-batches, and each possible cut.

    All plans with chunks defer dW, so that dWs are timed apart from the ops that make them ready. What all-to-alls
    carry makes a difference to the ops that make and sum rows only, about the same in all chunks: one plan of whole
    micro-batches measures it. So do tiles to these and to the experts, whatever their number: one plan has some.

    Args:
        seq_length: positions on a rank.
        dims: dimensions along which the run may be cut.
        overlap_range: widest range that the run allows.
        token_multiple: number that the tokens of a chunk are a multiple of.
        dispatches: what the run's all-to-alls may carry; the plain dispatch is profiled in any case.
        has_tiles: whether rows may go to other ranks in tiles.
    """
    sizes = {ChunkDim.BATCH: micro_batch_size, ChunkDim.SEQUENCE: seq_length}
    tokens = micro_batch_size * seq_length
    multiples = {dim: multiple_along(token_multiple, tokens // size) for dim, size in sizes.items()}
    whole = [fixed_plan(1, overlap_range=overlap_range)]
    cut = [
        fixed_plan(count, DwPolicy.FILL, dim, overlap_range, chunk_multiple=multiples[dim])
        for dim in dims
        for count in chunk_counts
        if count <= most_chunks(sizes[dim], multiples[dim]) and tokens // count >= MIN_TOKENS_OF_CHUNK
    ]
    others = [one for one in Dispatch.known().values() if one in dispatches and not one.is_plain]
    tiled = [fixed_plan(1, DwPolicy.FILL, overlap_range=overlap_range, tiles=_PROFILED_TILES)] if has_tiles else []
    return whole + [fixed_plan(1, overlap_range=overlap_range, dispatch=one) for one in others] + tiled + cut


def num_profile_steps(plans: Sequence[Plan], num_traced_steps: int = NUM_TRACED_STEPS) -> int:
    """Returns the training steps that a profile of these plans takes: one of each plan is not traced."""
    return len(plans) * (1 + num_traced_steps)


class ProfileRun:
    """Collects this rank's measurements in the steps of a profile.

    Attributes:
        plans: plan of each step, in order. Neighbours are often equal, and then there is nothing to switch.
    """

    def __init__(self, model: ProfiledModel, plans: Sequence[Plan], num_traced_steps: int = NUM_TRACED_STEPS) -> None:
        """Collective over all ranks of the world.

        Args:
            plans: plans to measure.
            num_traced_steps: traced steps of each plan, after one in which memory is counted.
        """
        self._model = model
        self._ep_group = _first_rank_of(parallel_state.get_expert_model_parallel_group())
        self._key = key_of(model)
        facts = self._key.model
        self.plans = [plan for plan in plans for _ in range(1 + num_traced_steps)]
        self._num_steps_of_plan = 1 + num_traced_steps
        self._trace = Trace(model.device, dist.get_rank())
        self._traced: list[tuple[StepTrace, Plan]] = []
        self._step_ms: defaultdict[str, list[float]] = defaultdict(list)
        self._launch_bound: defaultdict[str, list[float]] = defaultdict(list)
        self._memory: list[MemoryUse] = []
        self._received: defaultdict[int, int] = defaultdict(int)
        self._rows: dict[ChunkKey, RoutedRows] = {}
        self._expert_rows = ExpertRows(facts.expert_tp_size)
        self._largest_bytes: defaultdict[str, int] = defaultdict(int)
        self._num_done = 0

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Profiles the training step inside the context, which runs under ``plans[index]``.

        The first step under each plan is its warm-up, in which saved activations are counted; the others are traced.
        """
        assert index == self._num_done, f"step {index} of the profile follows {self._num_done} others"
        comm, trace = self._model.comm, self._trace
        plan, counts_memory = self.plans[index], index % self._num_steps_of_plan == 0
        saved = SavedActivations(trace, (weight for stage in self._model.stages for weight in stage.parameters()))
        comm.record_to(trace)
        comm.use(replace(comm.settings, expert_rows=None if counts_memory else self._expert_rows.add))
        trace.begin_step()
        try:
            with ExitStack() as stack:
                if counts_memory:
                    stack.enter_context(saved.counted())
                yield
            found = trace.end_step()
        finally:
            comm.record_to(None)
            comm.use(replace(comm.settings, expert_rows=None))
        if not counts_memory:
            self._add(found, plan)
        elif not plan.has_tiles:  # with which as much is kept as without
            self._memory += self._memory_uses(saved.bytes_by_op(), plan)
        self._num_done += 1

    def finish(self) -> Profile:
        """Measures the links and makes the profile. Collective over all ranks of the world, after all steps."""
        assert self._num_done == len(self.plans), f"{self._num_done} of {len(self.plans)} steps were run"
        link = self._measure_links()
        samples = self._samples(link)
        ep_rank = parallel_state.get_expert_model_parallel_rank()
        holders = _first_rank_of(parallel_state.get_expert_tensor_and_model_parallel_group())
        own = (
            samples.medians(link.slowdown),
            {name: statistics.median(times) for name, times in self._step_ms.items()},
            self._memory,
            RankRouting(self._ep_group, ep_rank, dict(self._received), self._rows, holders),
        )
        ranks = from_all_ranks(own)
        stages = from_all_ranks(parallel_state.get_pipeline_model_parallel_rank())
        medians = over_ranks([rank[0] for rank in ranks], stages)
        load = gathered_load(self._model.stages, self._expert_rows, len(self._traced))
        own_paces = paces_of_rank(samples.steps, medians.op_ms, link.slowdown)
        step_ms = from_all_ranks([step.timeline.step_ms for step, _ in self._traced])
        typical = typical_steps([str(plan) for _, plan in self._traced], step_ms)
        paces = from_all_ranks(RankPaces(self._ep_group, ep_rank, [own_paces[number] for number in typical]))
        # Every rank has the same figures now, but their sums may be rounded differently.
        return from_rank_0(lambda: replace(self._profile(link, ranks, medians, paces), expert_load=load))

    def _samples(self, link: LinkTimes) -> Samples:
        """The times of all traced steps. Work during messages is separated as in the simulator's engine."""
        curves = {kind.value: Curve(points, flat_below=True) for kind in OpKind if (points := link.all_to_all_of(kind))}

        def message_ms(span: Span) -> float:
            return curves[Op.parse(span.name).kind].at(span.num_bytes)

        samples = Samples()
        for step, plan in self._traced:
            samples.add(step, plan, self._key.model, message_ms if link.host_polls and link.all_to_all else None)
        return samples

    def _profile(
        self, link: LinkTimes, ranks: Sequence[_Rank], medians: OpMedians, paces: Sequence[RankPaces]
    ) -> Profile:
        facts = self._key.model
        names = list(dict.fromkeys(name for rank in ranks for name in rank[1]))
        return Profile(
            model=facts,
            device=self._key.device,
            versions=self._key.versions,
            ops=op_times(medians, facts),
            weight_grads=weight_grad_times(medians, facts),
            link=link,
            memory=median_memory([rank[2] for rank in ranks]),
            rest_ms=round(medians.rest_ms, 4),
            received_share=received_shares([rank[3] for rank in ranks], facts.ep_size),
            # All ranks wait for the slowest one.
            measured_steps_ms={name: round(max(rank[1][name] for rank in ranks), 4) for name in names},
            routing=chunk_routing([rank[3] for rank in ranks], facts.ep_size, facts.nodes),
            paces=step_paces(paces, facts.ep_size, len(facts.layer_kinds)),
            launch_bound={name: round(statistics.median(parts), 4) for name, parts in self._launch_bound.items()},
        )

    def _add(self, step: StepTrace, plan: Plan) -> None:
        facts = self._key.model
        self._traced.append((step, plan))
        self._step_ms[str(plan)].append(step.timeline.step_ms)
        if step.host:
            self._launch_bound[str(plan)].append(launch_bound_ms(step) / step.timeline.step_ms)
        for span in step.timeline.spans:
            if span.lane is Lane.COMM:
                kind = Op.parse(span.name).kind
                self._largest_bytes[kind] = max(self._largest_bytes[kind], span.num_bytes)
        for name, rows in step.received_rows.items():
            self._received[layer_of(name)] += sum(rows)
        self._rows.update(rows_of_step(step, plan, facts))

    def _memory_uses(self, bytes_by_op: dict[str, int], plan: Plan) -> list[MemoryUse]:
        """Returns the mean over this rank's layers of each kind."""
        facts = self._key.model
        totals: defaultdict[LayerKind, int] = defaultdict(int)
        layers: defaultdict[LayerKind, set[str]] = defaultdict(set)
        for name, num_bytes in bytes_by_op.items():
            key = op_key(Op.parse(name), plan, facts)
            totals[key.layer_kind] += num_bytes
            layers[key.layer_kind].add("" if key.layer_kind is LayerKind.NONE else name.partition(".")[0])
        segment = plan.segments[0]
        dim = segment.chunk_dim if segment.num_chunks > 1 else ChunkDim.BATCH
        means = {kind: round(total / facts.num_micro_batches / len(layers[kind])) for kind, total in totals.items()}
        return [
            MemoryUse(kind, dim, segment.num_chunks, means[kind], plan.dispatch if kind.has_experts else PLAIN)
            for kind in sorted(totals)
        ]

    def _measure_links(self) -> LinkTimes:
        facts, comm = self._key.model, self._model.comm
        counts_group = parallel_state.get_expert_tensor_and_model_parallel_group()
        num_counts = facts.num_experts * counts_group.size() // facts.ep_size
        ep_rank = parallel_state.get_expert_model_parallel_rank()
        largest_bytes = max(from_all_ranks(max(self._largest_bytes.values(), default=0)))
        between_nodes, inside_node = self._hops(largest_bytes)
        wires = Wires(
            whole=Link(comm.transport, self._ep_group, ep_rank, facts.ep_size, largest_bytes, comm.nodes is not None),
            between_nodes=between_nodes,
            inside_node=inside_node,
            reduce_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            counts=torch.zeros(num_counts, dtype=torch.int64, device=self._model.device),
            device=self._model.device,
            sizes=self._chunk_sizes(),
            loops_back=dist.get_backend() == "mock",
        )
        link = measure_links(wires)
        comm.stats.take()  # the messages of the sweep do not count for the training
        return link

    def _hops(self, largest_bytes: int) -> tuple[Link, Link] | tuple[None, None]:
        """The connections of two hops, if the run has them. Collective over all ranks of the world.

        Args:
            largest_bytes: largest message of any kind, for hops that no profiled plan had.
        """
        comm = self._model.comm
        if comm.nodes is None:
            return None, None
        counts_group = parallel_state.get_expert_tensor_and_model_parallel_group()
        ranks = dist.get_process_group_ranks(counts_group)
        expert_tp_size = counts_group.size() // self._key.model.ep_size
        wires = []
        for kinds, places in zip(
            (BETWEEN_NODES, INSIDE_NODE), comm.nodes.hops_of(counts_group.rank(), expert_tp_size), strict=True
        ):
            largest = max(from_all_ranks(max(self._largest_bytes[kind] for kind in kinds)))
            transport = comm.transport_of(Op(None, None, Phase.FORWARD, min(kinds)))
            place = places.index(counts_group.rank())
            leaves = kinds is BETWEEN_NODES
            wires.append(Link(transport, ranks[places[0]], place, len(places), largest or largest_bytes, leaves))
        return wires[0], wires[1]

    def _chunk_sizes(self) -> ChunkSizes:
        """Returns the sizes of half a micro-batch."""
        facts, config = self._key.model, self._model.config
        ffn = config.moe_ffn_hidden_size or config.ffn_hidden_size
        num_tokens = facts.micro_batch_size * facts.seq_length
        return ChunkSizes(
            tokens=max(1, num_tokens // _CHUNK_COUNTS[0]),
            topk=max(1, facts.topk),
            hidden=config.hidden_size,
            ffn=ffn * (2 if config.gated_linear_unit else 1) // config.expert_tensor_parallel_size,
            dtype=config.params_dtype,
        )


def _first_rank_of(group: dist.ProcessGroup) -> int:
    """A number that identifies a group among its kind."""
    return min(dist.get_process_group_ranks(group))


def median_memory(ranks: Sequence[Sequence[MemoryUse]]) -> tuple[MemoryUse, ...]:
    """Returns medians over the ranks that have layers of the kind."""
    found: defaultdict[MemoryUse, list[int]] = defaultdict(list)
    for uses in ranks:
        for use in uses:
            found[replace(use, saved_bytes=0)].append(use.saved_bytes)
    return tuple(replace(use, saved_bytes=round(statistics.median(sizes))) for use, sizes in found.items())
