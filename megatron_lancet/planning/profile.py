"""A profile: what a model's ops and links cost on a device, as data. The cost model reads it, the profiler writes it.

Legend: T tokens of a micro-batch on this rank (S * B), k chunks, n = T * top-k routed rows, H hidden size.

The compute ops of a chunk in one layer, in the order in which they run forward:

    moe layer     attention  route  preprocess  [dispatch]  shared_experts  experts  [combine]  postprocess
    dense layer   attention  mlp

``attention`` holds the layer's first norm, self-attention, the residual and, in a MoE layer, the second norm.
``preprocess`` ends where the dispatch is issued, ``experts`` where the combine is. ``shared_experts`` runs while the
dispatch is in flight. ``postprocess`` sums a token's rows and adds the residual. Beside the layers: ``embedding``
and ``head`` (last norm, output layer, loss), both on the whole micro-batch, and ``cut`` (a segment's micro-batch to
chunks and back).
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from megatron_lancet.files import MAX_COUNT, Range, from_plain, parse_object, read_text, take_version, to_plain
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim
from megatron_lancet.schedule.reductions import GradientReduction

PROFILE_VERSION = 2
_KINDS_IN_VERSION_1 = {
    "gate": OpKind.ROUTE.value,
    "permute": OpKind.PREPROCESS.value,
    "merge": OpKind.POSTPROCESS.value,
}
_LARGEST = 10**15
"""No time or size of a profile is larger."""
_Count = Annotated[int, Range(0, MAX_COUNT)]
_CountFrom1 = Annotated[int, Range(1, MAX_COUNT)]
_Size = Annotated[int, Range(0, _LARGEST)]
_SizeFrom1 = Annotated[int, Range(1, _LARGEST)]
_Ms = Annotated[float, Range(0, _LARGEST)]


class LayerKind(StrEnum):
    """What kind of layer it is."""

    MOE = "moe"
    DENSE = "dense"
    NONE = "none"
    """No layer: embedding, head."""


@dataclass(frozen=True)
class ModelFacts:
    """The model and the layout that were profiled, as far as a schedule depends on them.

    Attributes:
        name: what the profile is of; with ``device`` and ``versions`` the key of the cache.
        layer_kinds: of each layer of the model, in order.
        stage_of_layer: pipeline stage of each layer.
        micro_batch_size: samples of a micro-batch, B.
        seq_length: positions of a sample on this rank, S.
        num_micro_batches: of a step.
        topk: experts of a token.
        num_experts: of a MoE layer, on all ranks.
        ep_size: ranks that share the experts.
        world_size: ranks of the run.
        row_bytes: bytes of one routed row as it travels forward: token and probability.
        grad_row_bytes: the same in the backward.
        combine_row_bytes: bytes of one row on its way back, forward; without the probability.
        combine_grad_row_bytes: the same in the backward.
        counts_bytes: bytes that a rank sends in one exchange of token counts.
        has_shared_experts: whether MoE layers have any.
    """

    name: str
    layer_kinds: tuple[LayerKind, ...]
    stage_of_layer: tuple[int, ...]
    micro_batch_size: _SizeFrom1
    seq_length: _SizeFrom1
    num_micro_batches: _CountFrom1
    topk: _Count
    num_experts: _Count
    ep_size: _CountFrom1
    world_size: _SizeFrom1
    row_bytes: _Size
    grad_row_bytes: _Size
    combine_row_bytes: _Size
    combine_grad_row_bytes: _Size
    counts_bytes: _Size
    has_shared_experts: bool = False

    def __post_init__(self) -> None:
        if not self.layer_kinds or len(self.layer_kinds) != len(self.stage_of_layer):
            raise ValueError("layer_kinds and stage_of_layer must be of the same layers, at least one")
        stages = sorted(set(self.stage_of_layer))
        if stages != list(range(len(stages))):
            raise ValueError(f"pipeline stages count from 0 without gaps, found {stages[:8]}")

    @property
    def num_rows(self) -> int:
        """Routed rows of a micro-batch on one rank."""
        return self.micro_batch_size * self.seq_length * self.topk


@dataclass(frozen=True)
class OpTime:
    """Median time of one compute op of one chunk, without waiting, weight gradients and what messages cost beside it.

    Attributes:
        layer_kind: of the layer that it belongs to.
        kind: see the module's list.
        phase: F, or I (input gradient).
        chunk_dim: how the micro-batch was cut; batch where ``num_chunks`` is 1.
        num_chunks: k.
        chunk: which of them: sequence chunks differ.
        rows: what it worked on: rows received for ``experts``, tokens of the chunk for the others.
        ms: median over steps, layers and micro-batches.
    """

    layer_kind: LayerKind
    kind: str
    phase: Phase
    chunk_dim: ChunkDim
    num_chunks: _CountFrom1
    chunk: _Size
    rows: _Size
    ms: _Ms


@dataclass(frozen=True)
class WeightGradTime:
    """Median time of one weight gradient of one chunk.

    Attributes:
        layer_kind: of the layer; none for the output layer.
        name: of the weight inside the layer, for example ``self_attention.linear_qkv``.
        num_chunks: k.
        rows: tokens or rows that went through the layer.
        ms: median.
        pinned_bytes: memory that deferring it keeps alive.
        weight_bytes: of the gradient that it completes.
        after: the compute op in whose backward it becomes ready.
    """

    layer_kind: LayerKind
    name: str
    num_chunks: _CountFrom1
    rows: _Size
    ms: _Ms
    pinned_bytes: _Size
    weight_bytes: _Size
    after: str


@dataclass(frozen=True)
class LinkTimes:
    """What messages take, measured between the ranks of a group.

    Attributes:
        all_to_all: (bytes that a rank sends to others, ms until its peers have them), ascending in bytes.
        counts_ms: one exchange of token counts.
        all_reduce: (bytes of the reduced tensor, ms), ascending; empty if not measured.
        sends_share_link: True where a rank's messages go out one after the other whatever the other ranks do (gloo,
            a group per sender); False where a collective occupies all ranks from the last one's start (NCCL).
        compute_slowdown: factor by which compute beside a message in flight is slower, at least 1.
        queued: (bytes, ms by which a message that leaves behind another comes after it), ascending in bytes; empty if
            it is as long as a message alone. A latency is hidden then; a link that has rested may be faster at first.
        dispatches_apart: forward dispatches have connections of their own beside the other messages', so that two on
            their way together get half of the link each; False where all go one after the other.
    """

    all_to_all: tuple[tuple[_Size, _Ms], ...]
    counts_ms: _Ms
    all_reduce: tuple[tuple[_Size, _Ms], ...] = ()
    sends_share_link: bool = True
    compute_slowdown: Annotated[float, Range(0, _LARGEST)] = 1.0
    queued: tuple[tuple[_Size, _Ms], ...] = ()
    dispatches_apart: bool = False


@dataclass(frozen=True)
class MemoryUse:
    """Activations that a layer's chunks keep from forward to backward.

    Attributes:
        layer_kind: of the layer; none for what is kept beside layers.
        saved_bytes: for one micro-batch, all chunks together.
    """

    layer_kind: LayerKind
    chunk_dim: ChunkDim
    num_chunks: _CountFrom1
    saved_bytes: _Size


@dataclass(frozen=True)
class ChunkRouting:
    """Where the rows of one chunk went in one layer, in a micro-batch of the profile.

    Balanced routing is balanced over steps, not in each chunk; in each, all ranks wait for the one that got most.

    Attributes:
        layer: its global number, from 1.
        chunk_dim: how the micro-batch was cut; batch where ``num_chunks`` is 1.
        num_chunks: k.
        chunk: which of them.
        sent: rows that each rank of an expert-parallel group sent to others.
        received: rows that each rank's experts got.
    """

    layer: int
    chunk_dim: ChunkDim
    num_chunks: int
    chunk: int
    sent: tuple[_Size, ...]
    received: tuple[_Size, ...]


@dataclass(frozen=True)
class StepPace:
    """How fast the ranks of an expert-parallel group computed in one traced step: 1 is what the profile's times say.

    Ranks never run quite alike, and each all-to-all makes the others wait for the slower one.

    Attributes:
        forward: by layer, from 0 (beside layers) on, and by rank: factor of the times of its ops.
        backward: the same in the backward.
    """

    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Profile:
    """Everything that the cost model knows.

    Attributes:
        device: what it was measured on.
        versions: of the packages that matter, by name.
        rest_ms: of a step, what is neither forward nor backward: optimizer, loop, and gradient reduction unless
            ``gradients`` says how that is simulated.
        received_share: share of its group's routed rows that each rank of it receives, median over layers; sums to 1.
        measured_steps_ms: step time of each plan that was run for the profile, by the plan's text, for comparison.
        routing: of one micro-batch, by layer and chunk of each plan that was run; empty where it is not known.
        paces: of some of the traced steps, as different as all of them were; empty where they are not known.
        gradients: how they are summed over ranks beside the backward pass; None: after it, as part of the rest.
    """

    model: ModelFacts
    device: str
    versions: dict[str, str]
    ops: tuple[OpTime, ...]
    weight_grads: tuple[WeightGradTime, ...]
    link: LinkTimes
    memory: tuple[MemoryUse, ...]
    rest_ms: _Ms
    received_share: tuple[float, ...]
    measured_steps_ms: dict[str, float]
    routing: tuple[ChunkRouting, ...] = ()
    paces: tuple[StepPace, ...] = ()
    gradients: GradientReduction | None = None

    def __post_init__(self) -> None:
        ep_size = self.model.ep_size
        for index, chunk in enumerate(self.routing):
            if len(chunk.sent) != ep_size or len(chunk.received) != ep_size:
                raise ValueError(f"routing[{index}] must have rows for each of {ep_size} ranks")

    def to_json(self) -> str:
        """As readable JSON."""
        return json.dumps({"version": PROFILE_VERSION, **to_plain(self)}, indent=1)


def read_profile(path: Path) -> Profile:
    """What :meth:`Profile.to_json` wrote, now or in version 1.

    Raises:
        RecordError: the file can't be read, is no profile, or one of another version.
    """
    return profile_from_json(read_text(path), str(path))


def profile_from_json(text: str, where: str) -> Profile:
    """Like :func:`read_profile`, of the file's text.

    Args:
        where: what the text is, for messages.
    """
    value = parse_object(text, where)
    if value.get("version") == 1:
        value = {**_with_todays_kinds(value), "version": PROFILE_VERSION}
    take_version(value, PROFILE_VERSION, "the profile", where)
    return from_plain(Profile, value, where)


def _with_todays_kinds(value: Any) -> Any:
    """Parsed JSON of version 1, in which three kinds of ops had other names."""
    if isinstance(value, list):
        return [_with_todays_kinds(part) for part in value]
    if not isinstance(value, dict):
        return value
    renamed = {
        name: _KINDS_IN_VERSION_1[text]
        for name, text in value.items()
        if name in ("kind", "after") and isinstance(text, str) and text in _KINDS_IN_VERSION_1
    }
    return {name: _with_todays_kinds(part) for name, part in value.items()} | renamed
