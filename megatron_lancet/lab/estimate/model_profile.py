"""A profile of a run that was never measured: op times from sizes and speeds, for the planner's simulator."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.dry_run.layout import Layout
from megatron_lancet.lab.dry_run.report import Findings
from megatron_lancet.lab.estimate.devices import Speeds
from megatron_lancet.lab.estimate.kernels import Kernel, Part, backward_of, forward_of, time_ms
from megatron_lancet.lab.estimate.layer_parts import LayerParts, Piece
from megatron_lancet.lab.what_if.forecast import Routing
from megatron_lancet.lab.what_if.layout import times_of_messages, times_of_reductions
from megatron_lancet.planning.dispatch import nodes_of_group
from megatron_lancet.planning.link_times import LinkTimes
from megatron_lancet.planning.profile import ModelFacts, OpTime, Profile, WeightGradTime, packed_row_bytes
from megatron_lancet.planning.sizes.saved_tensors import FP32_BYTES, value_bytes
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim
from megatron_lancet.schedule.reductions import GradientReduction, default_bucket_bytes

CHUNK_COUNTS = (1, 2, 4)
_COUNT_BYTES = 8
_US_PER_MS = 1e3


@dataclass(frozen=True)
class Run:
    """A run of a launch script, as far as an estimate depends on it.

    Attributes:
        args: validated; a micro-batch is as large as it may be, and ``moe_router_topk`` counts the rows that are sent.
        routing: distribution of rows over the ranks.
        saves_scores: whether core attention is unfused.
    """

    args: argparse.Namespace
    findings: Findings
    routing: Routing
    saves_scores: bool

    @property
    def layout(self) -> Layout:
        """Sizes of the process groups."""
        return self.findings.layout

    @property
    def parts(self) -> LayerParts:
        """The ops of its layers."""
        return LayerParts(self.args, self.saves_scores)

    @property
    def recomputed_part(self) -> float:
        """Share of a layer's forward that full recompute repeats: 1, or below with ``block``."""
        args = self.args
        if args.recompute_granularity != "full":
            return 0.0
        most = max(len(chunk.layers) for stage in self.findings.stages for chunk in stage.chunks)
        return min(1.0, (args.recompute_num_layers or 0) / most) if args.recompute_method == "block" else 1.0

    @property
    def recomputed_experts(self) -> float:
        """Part of the MoE layers whose router, messages and experts stock runs again in the backward."""
        return max(self.recomputed_part, float("moe" in self.recomputed_modules))

    @property
    def recomputed_modules(self) -> frozenset[str]:
        """Names of ``--recompute-modules``."""
        is_selective = self.args.recompute_granularity == "selective"
        return frozenset(self.args.recompute_modules or ()) if is_selective else frozenset()


def facts_of(run: Run, ranks_per_node: int) -> ModelFacts:
    """The facts of a run, as its profiler would find them.

    Raises:
        UsageError: a pipeline stage has no layers.
    """
    args, layout = run.args, run.layout
    kinds: list[LayerKind] = []
    stage_of: list[int] = []
    for virtual in range(layout.virtual):
        for number, stage in enumerate(run.findings.stages):
            layers = stage.chunks[virtual].layers
            kinds += layers
            stage_of += [number] * len(layers)
    if set(stage_of) != set(range(layout.pipeline)):
        raise UsageError("a pipeline stage has no layers, which can't be estimated. Change the layout of the pipeline.")
    value, hidden = value_bytes(args), args.hidden_size
    prob = {"fp32": 4, "fp64": 8}.get(args.moe_router_dtype or "", value)
    nodes = nodes_of_group(layout.expert, layout.expert_tensor, ranks_per_node)
    row = packed_row_bytes(hidden * value, prob)
    return ModelFacts(
        name="estimated",
        layer_kinds=tuple(kinds),
        stage_of_layer=tuple(stage_of),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length // layout.context // run.parts.sharers,
        num_micro_batches=layout.num_micro_batches,
        topk=args.moe_router_topk,
        num_experts=args.num_experts,
        ep_size=layout.expert,
        world_size=layout.num_ranks,
        row_bytes=row,
        combine_row_bytes=hidden * value,
        counts_bytes=args.num_experts * _COUNT_BYTES,
        has_shared_experts=bool(args.moe_shared_expert_intermediate_size),
        pads_to_capacity=args.moe_pad_expert_input_to_capacity,
        prob_bytes=prob,
        nodes=nodes if isinstance(nodes, Nodes) else None,
        expert_tp_size=layout.expert_tensor,
        wiring="late-sum" if getattr(args, "lancet_shortcut_moe", False) else "",
    )


def profile_of(run: Run, speeds: Speeds, rest_ms: float) -> Profile:
    """The profile of a run on a device.

    Args:
        rest_ms: time of a step outside forward and backward.
    """
    facts = facts_of(run, speeds.cluster.ranks_per_node)
    share = run.routing.share(facts, (), facts.ep_size)
    reduction = _reduction(run)
    return Profile(
        model=facts,
        device="estimated",
        versions={},
        ops=tuple(_ops(run, facts, speeds)),
        weight_grads=tuple(_weight_grads(run, facts, speeds)),
        link=_link(run, facts, speeds, reduction),
        memory=(),
        rest_ms=rest_ms,
        received_share=share,
        measured_steps_ms={},
        gradients=reduction,
    )


def _link(run: Run, facts: ModelFacts, speeds: Speeds, reduction: GradientReduction | None) -> LinkTimes:
    slowdown = 1 / speeds.device.speed_beside_message
    alone = LinkTimes((), 0.0, sends_share_link=False, compute_slowdown=slowdown, host_polls=False)
    link = times_of_messages(facts, speeds.cluster, alone)
    link = replace(link, counts_ms=link.counts_ms + speeds.device.counts_us / _US_PER_MS)
    if reduction is None:
        return link
    largest = max(reduction.bucket_bytes, max(held.all for held in run.findings.size.held) * FP32_BYTES)
    return times_of_reductions(link, speeds.cluster, largest, reduction.dense_ranks, run.layout.tensor)


def _reduction(run: Run) -> GradientReduction | None:
    """Gradient reduction beside the backward pass; None if there is none, or it comes after the pass."""
    args, layout = run.args, run.layout
    ranks = layout.data * layout.context
    if not args.overlap_grad_reduce or ranks == 1:
        return None
    element_bytes = FP32_BYTES if args.accumulate_allreduce_grads_in_fp32 else value_bytes(args)
    bucket_bytes = default_bucket_bytes(ranks) * element_bytes // FP32_BYTES
    if args.ddp_bucket_size is not None:
        bucket_bytes = args.ddp_bucket_size * element_bytes
    if args.ddp_num_buckets is not None:
        bucket_bytes = int(run.findings.size.held[0].all) // args.ddp_num_buckets * element_bytes
    return GradientReduction(
        dense_ranks=ranks,
        expert_ranks=layout.expert_data,
        bucket_bytes=max(1, bucket_bytes),
        is_scatter=args.use_distributed_optimizer,
        has_late_head=not args.untie_embeddings_and_output_weights,
    )


@dataclass(frozen=True)
class _Cut:
    """One chunk of a micro-batch: which, of how many, and what it holds."""

    dim: ChunkDim
    count: int
    chunk: int
    piece: Piece


def _cuts(run: Run, facts: ModelFacts) -> Iterator[_Cut]:
    """Yields the chunks whose times the profile has."""
    args = run.args
    whole = args.micro_batch_size * args.seq_length / run.layout.context
    for dim in ChunkDim:
        for count in CHUNK_COUNTS:
            if (count == 1 and dim is ChunkDim.SEQUENCE) or count > facts.size_along(dim)[0]:
                continue
            for chunk in range(count):
                # A token attends to half of its sample, in the mean; in a part of it to all before, and half of that.
                seen = (chunk + 0.5) / count if dim is ChunkDim.SEQUENCE else 0.5
                yield _Cut(dim, count, chunk, Piece(whole / count, args.seq_length * seen))


def _parts_of_cut(run: Run, facts: ModelFacts, cut: _Cut) -> Iterator[tuple[LayerKind, OpKind, list[Part], float]]:
    """Yields kind of the layer, op, its parts, and the rows on which the op works."""
    parts, own = run.parts, cut.piece.tokens / run.parts.sharers
    rows = own * facts.topk
    for kind in dict.fromkeys(facts.layer_kinds):
        for op, its in parts.of_layer(kind, cut.piece, rows).items():
            yield kind, op, its, rows if op is OpKind.EXPERTS else own
    if cut.count == 1:
        for op, its in parts.beside(cut.piece).items():
            yield LayerKind.NONE, op, its, own


def _ops(run: Run, facts: ModelFacts, speeds: Speeds) -> Iterator[OpTime]:
    for cut in _cuts(run, facts):
        for kind, op, parts, rows in _parts_of_cut(run, facts, cut):
            back = time_ms(backward_of(parts), speeds) + again_ms(run, kind, parts, speeds)
            for phase, ms in ((Phase.FORWARD, time_ms(forward_of(parts), speeds)), (Phase.INPUT_GRAD, back)):
                yield OpTime(kind, op, phase, cut.dim, cut.count, cut.chunk, round(rows), ms)


def again_ms(run: Run, kind: LayerKind, parts: Sequence[Part], speeds: Speeds) -> float:
    """Time of what the backward of an op recomputes."""
    if kind is LayerKind.NONE:
        return 0.0
    modules, part = run.recomputed_modules, run.recomputed_part
    chosen: list[Kernel] = forward_of([one for one in parts if part or one.modules & modules])
    return time_ms(chosen, speeds) * (part or 1.0)


def _weight_grads(run: Run, facts: ModelFacts, speeds: Speeds) -> Iterator[WeightGradTime]:
    gradient = FP32_BYTES if run.args.accumulate_allreduce_grads_in_fp32 else value_bytes(run.args)
    for cut in _cuts(run, facts):
        if cut.chunk or (cut.count > 1 and cut.dim is ChunkDim.BATCH and facts.seq_length >= cut.count):
            continue  # chunks of equal size cost the same, and those along the sequence stand for both dimensions
        for kind, op, parts, rows in _parts_of_cut(run, facts, cut):
            for part in reversed(parts):
                for weight in part.weights:
                    yield WeightGradTime(
                        kind,
                        weight.name,
                        cut.count,
                        round(rows),
                        time_ms([weight.kernel], speeds),
                        round(weight.pinned_bytes),
                        round(weight.numel * gradient),
                        op,
                    )
