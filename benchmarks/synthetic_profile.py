"""Profiles that no machine was measured for: tests and benchmarks of the planner share them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_lancet.planning.link_times import LinkTimes
from megatron_lancet.planning.profile import MemoryUse, ModelFacts, OpTime, Profile, WeightGradTime
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim
from megatron_lancet.schedule.turns import Compute, verbs_of

ROW_BYTES = 1000
KINDS = {"m": LayerKind.MOE, "d": LayerKind.DENSE, "*": LayerKind.ATTENTION_ONLY, "E": LayerKind.MOE_ONLY}
KINDS |= {"-": LayerKind.MLP_ONLY}
OP_MS: dict[str, float] = {
    OpKind.EMBEDDING: 0.5,
    OpKind.CUT: 0.1,
    OpKind.ATTENTION: 4.0,
    OpKind.NORM: 0.4,
    OpKind.ROUTE: 0.5,
    OpKind.PREPROCESS: 0.5,
    OpKind.EXPERTS: 6.0,
    OpKind.POSTPROCESS: 0.5,
    OpKind.MLP: 5.0,
    OpKind.HEAD: 3.0,
}
DW_MS: dict[str, float] = {OpKind.ATTENTION: 3.0, OpKind.EXPERTS: 6.0, OpKind.MLP: 5.0, OpKind.HEAD: 2.0}


@dataclass(frozen=True)
class Machine:
    """A made-up model and machine. Times are of an unchunked micro-batch; a chunk takes its part and ``overhead_ms``.

    Attributes:
        layers: letters of the model's layers: ``m`` for MoE, ``d`` for dense; ``*``, ``E``, ``-`` for a hybrid model's.
        link_ms: of a message with all rows of a balanced micro-batch.
        latency_ms: of any message.
        overhead_ms: that each chunk of each op takes more.
        backward_factor: input gradients' time over forward time.
        dw_ms: weight gradients of a layer kind's ops, by op.
        shares: of routed rows by rank.
        num_nodes: on which the ranks are, equally many on each.
        between_nodes: time of a byte between nodes over the time of a byte to all ranks, where there are several nodes.
        inside_node: the same for a byte inside a node.
        topk: experts of a token, of two for each rank.
        tiles: of another profiled plan; 0 for none. A part of the experts takes its part of the time and
            ``overhead_ms``.
        pinned_bytes: of one dW of an unchunked micro-batch.
        saved_bytes: of a layer; each chunk more adds a tenth.
    """

    layers: str = "mm"
    stages: tuple[int, ...] = ()
    op_ms: Mapping[str, float] = field(default_factory=lambda: OP_MS)
    dw_ms: Mapping[str, float] = field(default_factory=lambda: DW_MS)
    link_ms: float = 5.0
    latency_ms: float = 0.1
    counts_ms: float = 0.2
    overhead_ms: float = 0.1
    backward_factor: float = 1.0
    shares: tuple[float, ...] = (0.5, 0.5)
    num_nodes: int = 1
    between_nodes: float = 1.0
    inside_node: float = 1.0
    topk: int = 1
    tiles: int = 0
    micro_batch_size: int = 8
    seq_length: int = 64
    num_micro_batches: int = 1
    chunk_counts: tuple[int, ...] = (1, 2, 4, 8)
    dims: tuple[ChunkDim, ...] = (ChunkDim.BATCH,)
    sends_share_link: bool = True
    host_polls: bool = True
    compute_slowdown: float = 1.0
    pinned_bytes: int = 1_000_000
    saved_bytes: int = 10_000_000
    rest_ms: float = 1.0


def synthetic_profile(machine: Machine) -> Profile:
    """What profiling such a machine would have written."""
    kinds = tuple(KINDS[letter] for letter in machine.layers)
    ep_size = len(machine.shares)
    model = ModelFacts(
        name="synthetic",
        layer_kinds=kinds,
        stage_of_layer=machine.stages or (0,) * len(kinds),
        micro_batch_size=machine.micro_batch_size,
        seq_length=machine.seq_length,
        num_micro_batches=machine.num_micro_batches,
        topk=machine.topk,
        num_experts=2 * ep_size,
        ep_size=ep_size,
        world_size=ep_size,
        row_bytes=ROW_BYTES,
        combine_row_bytes=ROW_BYTES,
        counts_bytes=64,
        has_shared_experts=OpKind.SHARED_EXPERTS in machine.op_ms,
        nodes=Nodes(machine.num_nodes, ep_size // machine.num_nodes) if machine.num_nodes > 1 else None,
    )
    full_bytes = round(model.num_rows * (1 - 1 / ep_size)) * ROW_BYTES or 1
    per_byte_ms = (machine.link_ms - machine.latency_ms) / full_bytes
    sizes = (0, full_bytes, 4 * full_bytes)
    whole, between, inside = (
        tuple((size, machine.latency_ms + factor * per_byte_ms * size) for size in sizes)
        for factor in (1.0, machine.between_nodes, machine.inside_node)
    )
    return Profile(
        model=model,
        device="synthetic",
        versions={},
        ops=tuple(_op_times(machine)),
        weight_grads=tuple(_weight_grads(machine)),
        link=LinkTimes(
            all_to_all=whole,
            counts_ms=machine.counts_ms,
            sends_share_link=machine.sends_share_link,
            compute_slowdown=machine.compute_slowdown,
            host_polls=machine.host_polls,
            between_nodes=between if machine.num_nodes > 1 else (),
            inside_node=inside if machine.num_nodes > 1 else (),
        ),
        memory=tuple(
            MemoryUse(kind, dim, count, machine.saved_bytes * (9 + count) // 10)
            for kind in KINDS.values()
            for dim, count in _cuts(machine)
        ),
        rest_ms=machine.rest_ms,
        received_share=machine.shares,
        measured_steps_ms={},
    )


def _cuts(machine: Machine) -> Sequence[tuple[ChunkDim, int]]:
    """The ways of cutting that were profiled."""
    more = [(dim, count) for dim in machine.dims for count in machine.chunk_counts if count > 1]
    sizes = {ChunkDim.BATCH: machine.micro_batch_size, ChunkDim.SEQUENCE: machine.seq_length}
    return [(ChunkDim.BATCH, 1), *((dim, count) for dim, count in more if count <= sizes[dim])]


def _ops(kind: LayerKind) -> list[OpKind]:
    return [verb.kind for verb in verbs_of(kind, has_shared_experts=True) if isinstance(verb, Compute)]


def _rows(machine: Machine, op: str) -> int:
    """Rows of an op in a micro-batch."""
    tokens = machine.micro_batch_size * machine.seq_length
    return tokens * machine.topk if op == OpKind.EXPERTS else tokens


def _op_times(machine: Machine) -> list[OpTime]:
    times = []
    places = [(kind, op, _cuts(machine)) for kind in KINDS.values() for op in _ops(kind)]
    places += [(LayerKind.NONE, OpKind.CUT, _cuts(machine))]
    places += [(LayerKind.NONE, op, [(ChunkDim.BATCH, 1)]) for op in (OpKind.EMBEDDING, OpKind.HEAD)]
    for kind, op, cuts in places:
        if op not in machine.op_ms:
            continue
        for dim, count in cuts:
            for chunk in range(count):
                # Attention of a late sequence chunk has more to look at.
                weight = (2 * chunk + 1) / count if dim is ChunkDim.SEQUENCE and op == OpKind.ATTENTION else 1.0
                ms = machine.op_ms[op] * weight / count + (machine.overhead_ms if count > 1 else 0.0)
                for phase, factor in ((Phase.FORWARD, 1.0), (Phase.INPUT_GRAD, machine.backward_factor)):
                    rows = _rows(machine, op) // count
                    times.append(OpTime(kind, op, phase, dim, count, chunk, rows, ms * factor))
    return [*times, *_parts_of_experts(machine)] if machine.tiles else times


def _parts_of_experts(machine: Machine) -> Iterator[OpTime]:
    """The experts with tiles and with two halves of the rows that stay on a rank, if all ranks have equal shares."""
    rows, kept_part = _rows(machine, OpKind.EXPERTS), 1 / len(machine.shares)
    for kind in (kind for kind in KINDS.values() if kind.has_experts):
        for op, part in ((OpKind.OWN_EXPERTS, kept_part / 2), (OpKind.EXPERTS, (1 - kept_part) / machine.tiles)):
            for phase, factor in ((Phase.FORWARD, 1.0), (Phase.INPUT_GRAD, machine.backward_factor)):
                ms = (machine.op_ms[OpKind.EXPERTS] * part + machine.overhead_ms) * factor
                yield OpTime(kind, op, phase, ChunkDim.BATCH, 1, 0, round(rows * part), ms, tiles=machine.tiles)


def _weight_grads(machine: Machine) -> list[WeightGradTime]:
    names = {OpKind.ATTENTION: "self_attention.linear_qkv", OpKind.EXPERTS: "mlp.experts", OpKind.MLP: "mlp.linear_fc1"}
    places = [(kind, op) for kind in KINDS.values() for op in _ops(kind) if op in names]
    places += [(LayerKind.NONE, OpKind.HEAD)]
    return [
        WeightGradTime(
            kind,
            names.get(op, "output_layer"),
            count,
            _rows(machine, op) // count,
            machine.dw_ms[op] / count,
            machine.pinned_bytes // count,
            machine.pinned_bytes,
            op,
        )
        for kind, op in places
        if op in machine.dw_ms
        for count in sorted({count for _, count in _cuts(machine)})
        if kind is not LayerKind.NONE or count == 1
    ]
