"""Profiles: measured costs of a model's ops and links on a device. The profiler writes them, the cost model reads them.

Legend: T tokens of a micro-batch on this rank (S * B), k chunks, n = T * top-k routed rows, H hidden size.

The compute ops of a chunk in one layer, in the order in which they run forward:

    moe layer     attention  route  preprocess  [dispatch]  shared_experts  experts  [combine]  postprocess
    dense layer   attention  mlp

Layers of a hybrid model have one part of these: ``attention`` alone, ``mlp`` alone, or a moe layer's ops from the
router on, with ``norm`` before them. A multi-token prediction is a layer behind ``mtp_projection``, on the full
micro-batch: the norm of the layer before it, the embedding of the next tokens and the projection.

``attention`` holds the layer's first norm, self-attention, the residual and, in a moe layer, the second norm.
``preprocess`` ends where the dispatch is issued, ``experts`` where the combine is. ``shared_experts`` runs while the
dispatch is in flight. ``postprocess`` sums a token's rows and adds the residual. Next to the layers: ``embedding``
and ``head`` (last norm, output layer, loss), both on the full micro-batch, and ``cut`` (a segment's micro-batch to
chunks and back).
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lancet.files.reader import RecordError, parse_record, read_text
from megatron_lancet.files.records import OMITTED_AT_DEFAULT, to_plain
from megatron_lancet.planning.figures import Count, CountFrom1, Ms, Size, SizeFrom1
from megatron_lancet.planning.link_times import LinkTimes
from megatron_lancet.planning.load.expert_load import ExpertLoad
from megatron_lancet.schedule.chunk_sizes import multiple_along
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.layout import Layout
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import Phase
from megatron_lancet.schedule.plan import ChunkDim
from megatron_lancet.schedule.reductions import GradientReduction

PROFILE_VERSION = 3
_ROW_ALIGNMENT_BYTES = 16
"""Alignment of each tensor's part of a packed row, as in ``runtime/rows/packing.py``."""


def packed_row_bytes(*part_bytes: int) -> int:
    """Bytes of one row of a message that holds several tensors.

    Args:
        part_bytes: bytes of a row of each tensor.
    """
    return sum(-(-size // _ROW_ALIGNMENT_BYTES) * _ROW_ALIGNMENT_BYTES for size in part_bytes)


@dataclass(frozen=True)
class ModelFacts:
    """The model and the layout that were profiled, as far as a schedule depends on them.

    Attributes:
        name: name of the profiled model; with ``device`` and ``versions`` the key of the cache.
        layer_kinds: kind of each layer; multi-token predictions come last, a repeated one several times.
        stage_of_layer: pipeline stage of each layer, from 0.
        micro_batch_size: samples of a micro-batch, B.
        seq_length: positions of a sample on this rank, S.
        num_micro_batches: micro-batches of a step.
        topk: experts of a token.
        num_experts: experts of a MoE layer, on all ranks.
        ep_size: number of ranks that share the experts.
        world_size: number of ranks of the run.
        row_bytes: bytes of one row in a dispatch, forward or backward: token and probability, or their gradients.
        combine_row_bytes: bytes of one row in a combine, without the probability.
        counts_bytes: bytes that a rank sends in one exchange of token counts.
        token_multiple: number of tokens that the tokens of each chunk are a multiple of.
        num_mtp_layers: number of layers that are multi-token predictions.
        repeats_mtp_layer: whether they are one layer, which runs several times.
        num_output_uses: how often a micro-batch passes through the output layer with a weight gradient.
        pads_to_capacity: whether routers give every expert equally many rows of a micro-batch.
        prob_bytes: bytes of one probability of an expert.
        nodes: how expert-parallel groups lie on nodes; None if two hops are impossible, or unknown.
        expert_tp_size: number of ranks that hold the parts of the same experts.
        wiring: see :func:`~megatron_lancet.schedule.turns.program`.
    """

    name: str
    layer_kinds: tuple[LayerKind, ...]
    stage_of_layer: tuple[int, ...]
    micro_batch_size: SizeFrom1
    seq_length: SizeFrom1
    num_micro_batches: CountFrom1
    topk: Count
    num_experts: Count
    ep_size: CountFrom1
    world_size: SizeFrom1
    row_bytes: Size
    combine_row_bytes: Size
    counts_bytes: Size
    has_shared_experts: bool = False
    token_multiple: CountFrom1 = 1
    num_mtp_layers: Size = 0
    repeats_mtp_layer: bool = False
    num_output_uses: CountFrom1 = 1
    pads_to_capacity: bool = False
    prob_bytes: CountFrom1 = 4
    nodes: Nodes | None = None
    expert_tp_size: CountFrom1 = 1
    wiring: str = field(default="", metadata=OMITTED_AT_DEFAULT)

    def __post_init__(self) -> None:
        if not self.layer_kinds or len(self.layer_kinds) != len(self.stage_of_layer):
            raise ValueError("layer_kinds and stage_of_layer must be of the same layers, at least one")
        if self.num_mtp_layers > len(self.layer_kinds):
            raise ValueError(f"num_mtp_layers is {self.num_mtp_layers} of {len(self.layer_kinds)} layers")
        stages = sorted(set(self.stage_of_layer))
        if stages != list(range(len(stages))):
            raise ValueError(f"pipeline stages count from 0 without gaps, found {stages[:8]}")

    @property
    def num_rows(self) -> int:
        """Routed rows of a micro-batch on one rank."""
        return self.micro_batch_size * self.seq_length * self.topk

    @property
    def layout(self) -> Layout:
        """The layout that a dispatch depends on, as far as a profile has it."""
        return Layout(self.ep_size, self.num_experts, self.topk, self.pads_to_capacity, self.nodes)

    def row_bytes_to(self, num_groups: int) -> int:
        """Bytes of one row in a dispatch that goes once to each of the groups which hold a part of the experts.

        A row has the token, the probabilities of a group's experts, and the choice among them, a bit for each. A
        combine has the plain combine's rows.
        """
        num_experts = self.num_experts // num_groups
        return packed_row_bytes(self.combine_row_bytes, (num_experts + -(-num_experts // 8)) * self.prob_bytes)

    def size_along(self, dim: ChunkDim) -> tuple[int, int]:
        """Samples or positions of a micro-batch along ``dim``, and the tokens of one of them."""
        sizes = self.micro_batch_size, self.seq_length
        return sizes if dim is ChunkDim.BATCH else (sizes[1], sizes[0])

    def chunk_multiple(self, dim: ChunkDim) -> int:
        """Number of samples or positions that chunks along ``dim`` are a multiple of."""
        return multiple_along(self.token_multiple, self.size_along(dim)[1])

    @property
    def mtp_layers(self) -> range:
        """Numbers of the layers that are multi-token predictions."""
        num_layers = len(self.layer_kinds)
        return range(num_layers - self.num_mtp_layers + 1, num_layers + 1)

    def owner_of_weights(self, layer: int) -> int:
        """The layer whose name the weights have: a repeated layer's first number, or the layer itself."""
        return self.mtp_layers[0] if self.repeats_mtp_layer and layer in self.mtp_layers else layer


@dataclass(frozen=True)
class OpTime:
    """Median time of one compute op of one chunk, without waits, weight gradients and the slowdown by messages.

    Attributes:
        layer_kind: kind of its layer.
        kind: see the list of the module.
        phase: F, or I (input gradient).
        chunk_dim: dimension of the chunks; batch if ``num_chunks`` is 1.
        num_chunks: k.
        chunk: index of the chunk; sequence chunks differ.
        rows: received rows for ``experts`` and ``own_experts``, tokens of the chunk for other ops.
        ms: median over steps, layers and micro-batches.
        dispatch: what all-to-alls carried; plain for ops on which that has no effect.
        tiles: parts in which the rows went to other ranks, with which ``experts`` is one of these and ``own_experts``
            the work on rows that stay; 0 for ops on which that has no effect.
        host_ms: time in which the host launches it; 0 where the host computes, or if that is unknown.
    """

    layer_kind: LayerKind
    kind: str
    phase: Phase
    chunk_dim: ChunkDim
    num_chunks: CountFrom1
    chunk: Size
    rows: Size
    ms: Ms
    dispatch: Dispatch = field(default=PLAIN, metadata=OMITTED_AT_DEFAULT)
    tiles: Size = field(default=0, metadata=OMITTED_AT_DEFAULT)
    host_ms: Ms = field(default=0.0, metadata=OMITTED_AT_DEFAULT)


@dataclass(frozen=True)
class WeightGradTime:
    """Median time of one weight gradient of one chunk.

    Attributes:
        layer_kind: kind of its layer; none for the output layer.
        name: name of the weight inside the layer, for example ``self_attention.linear_qkv``.
        num_chunks: k.
        rows: tokens or rows of the chunk in the layer.
        pinned_bytes: memory that stays alive while it is deferred.
        weight_bytes: size of the weight's gradient.
        after: the compute op in whose backward it becomes ready.
        host_ms: like an op's.
    """

    layer_kind: LayerKind
    name: str
    num_chunks: CountFrom1
    rows: Size
    ms: Ms
    pinned_bytes: Size
    weight_bytes: Size
    after: str
    host_ms: Ms = field(default=0.0, metadata=OMITTED_AT_DEFAULT)


@dataclass(frozen=True)
class MemoryUse:
    """Activations that a layer's chunks keep from forward to backward.

    Attributes:
        layer_kind: kind of the layer; none for activations outside the layers.
        saved_bytes: activations of one micro-batch, all chunks together.
        dispatch: what all-to-alls carried; plain for layers without experts.
    """

    layer_kind: LayerKind
    chunk_dim: ChunkDim
    num_chunks: CountFrom1
    saved_bytes: Size
    dispatch: Dispatch = field(default=PLAIN, metadata=OMITTED_AT_DEFAULT)


@dataclass(frozen=True)
class HopRows:
    """Rows of one chunk that each rank of an expert-parallel group would send to others in two hops, whichever ran.

    Attributes:
        node_sent: to other nodes, one for each of its tokens and node.
        node_received: from other nodes.
        local_sent: to other ranks of its node, one for each row that has come to it (its own included) and rank; with
            expert tensor parallelism for each expert-TP rank.
        local_received: from other ranks of its node.
    """

    node_sent: tuple[Size, ...]
    node_received: tuple[Size, ...]
    local_sent: tuple[Size, ...]
    local_received: tuple[Size, ...]


@dataclass(frozen=True)
class ChunkRouting:
    """Routing of one chunk in one layer, in a micro-batch of the profile.

    Balanced routing is balanced over steps, not in each chunk; in each, all ranks wait for the one with most rows.

    Attributes:
        layer: global layer number, from 1.
        chunk_dim: dimension of the chunks; batch if ``num_chunks`` is 1.
        num_chunks: k.
        chunk: index of the chunk.
        sent: rows that each rank of an expert-parallel group sent to others.
        received: rows that each rank's experts received.
        sent_tokens: distinct rows that each rank would send to others by deduplicated dispatch, whichever ran: pairs of
            one of its tokens and another rank that holds any of the token's experts. None if unknown.
        received_tokens: distinct rows that would arrive at each rank from others. None if unknown.
        hops: rows of two hops; None if unknown.
    """

    layer: int
    chunk_dim: ChunkDim
    num_chunks: CountFrom1
    chunk: int
    sent: tuple[Size, ...]
    received: tuple[Size, ...]
    sent_tokens: tuple[Size, ...] | None = field(default=None, metadata=OMITTED_AT_DEFAULT)
    received_tokens: tuple[Size, ...] | None = field(default=None, metadata=OMITTED_AT_DEFAULT)
    hops: HopRows | None = field(default=None, metadata=OMITTED_AT_DEFAULT)

    def __post_init__(self) -> None:
        if (self.sent_tokens is None) != (self.received_tokens is None):
            raise ValueError("sent_tokens and received_tokens must be both given, or neither")


@dataclass(frozen=True)
class StepPace:
    """Pace of the ranks of an expert-parallel group in one traced step, as factors of the profile's times.

    Ranks differ slightly in pace, and at each all-to-all the others wait for the slowest one.

    Attributes:
        forward: factor of forward ops, by layer (0 outside the layers) and rank.
        backward: factor of backward ops, by layer and rank.
    """

    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Profile:
    """The input of the cost model.

    Attributes:
        device: name of the device.
        versions: versions of the relevant packages, by name.
        rest_ms: time of a step outside forward and backward: optimizer, loop, and gradient reduction unless
            ``gradients`` is set.
        received_share: share of its group's routed rows that each rank receives, median over layers; sums to 1.
        measured_steps_ms: step time of each plan that was run for the profile, by the plan's text, for comparison.
        routing: routing of one micro-batch, by layer and chunk of each plan that was run; empty if unknown.
        paces: paces of some traced steps that are representative of all; empty if unknown.
        gradients: gradient reduction during the backward pass; None if it is part of ``rest_ms``.
        expert_load: load of the experts in the traced steps; None if unknown.
        launch_bound: part of the step of each plan, by its text, in which the device computes as fast as the host
            launches, and no message is in flight; empty where the host computes.
    """

    model: ModelFacts
    device: str
    versions: dict[str, str]
    ops: tuple[OpTime, ...]
    weight_grads: tuple[WeightGradTime, ...]
    link: LinkTimes
    memory: tuple[MemoryUse, ...]
    rest_ms: Ms
    received_share: tuple[float, ...]
    measured_steps_ms: dict[str, float]
    routing: tuple[ChunkRouting, ...] = ()
    paces: tuple[StepPace, ...] = ()
    gradients: GradientReduction | None = None
    expert_load: ExpertLoad | None = None
    launch_bound: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ep_size = self.model.ep_size
        for index, chunk in enumerate(self.routing):
            figures = [chunk.sent, chunk.received, chunk.sent_tokens, chunk.received_tokens]
            if chunk.hops is not None:
                hops = chunk.hops
                figures += [hops.node_sent, hops.node_received, hops.local_sent, hops.local_received]
            if any(of_ranks is not None and len(of_ranks) != ep_size for of_ranks in figures):
                raise ValueError(f"routing[{index}] must have rows for each of {ep_size} ranks")
        load = self.expert_load
        if load is not None and load.layers and (load.ep_size, load.num_experts) != (ep_size, self.model.num_experts):
            raise ValueError(f"expert_load must have rows of {ep_size} ranks for {self.model.num_experts} experts")

    def to_json(self) -> str:
        """The profile as indented JSON."""
        return json.dumps({"version": PROFILE_VERSION, **to_plain(self)}, indent=1)


def read_profile(path: Path) -> Profile:
    """Reads the output of :meth:`Profile.to_json`.

    Raises:
        RecordError: the file can't be read, is no profile, or a profile of another version.
    """
    text = read_text(path)
    try:
        return profile_from_json(text, str(path))
    except RecordError:
        if _is_plan(text):
            raise RecordError(f"{path}: this is a plan, expected a profile") from None
        raise


def _is_plan(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and not value.keys().isdisjoint(("plan", "segments"))


def profile_from_json(text: str, where: str) -> Profile:
    """Parses the text of a profile; see :func:`read_profile`.

    Args:
        where: name of the source, for error messages.
    """
    return parse_record(Profile, text, PROFILE_VERSION, "the profile", where)
