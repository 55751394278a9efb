"""The plan: all settings of the overlap that must be the same on all ranks."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from enum import StrEnum

from megatron_lancet import registry
from megatron_lancet.files.records import OMITTED_AT_DEFAULT, to_plain
from megatron_lancet.schedule.chunk_sizes import chunk_sizes
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch, LocalTokens

PLAN_VERSION = 3
NO_PAIRING = "this installation of Megatron-Lancet lacks features/pairing"


class ChunkDim(StrEnum):
    """The tensor dimension along which a micro-batch is split into chunks."""

    BATCH = "batch"
    """Samples; attention of a chunk does not depend on other chunks."""
    SEQUENCE = "sequence"
    """Positions; a chunk attends to keys and values of the chunks before it, so causal attention stays exact."""


class OverlapRange(StrEnum):
    """The part of a segment's layers that runs chunk by chunk (Lancet section 5: partition ranges)."""

    EXPERTS = "experts"
    """From dispatch to combine; the router runs on the full micro-batch."""
    GATE = "gate"
    """From the router to combine."""
    STACK = "stack"
    """All layers of the segment, including dense ones, without synchronization between layers."""

    @property
    def has_attention(self) -> bool:
        """Whether attention runs chunk by chunk."""
        return self is OverlapRange.STACK


class DwPolicy(StrEnum):
    """When the weight gradients (dW) of linear layers are computed in the backward pass."""

    NONE = "none"
    """At once, as in stock Megatron."""
    FILL = "fill"
    """Deferred, to run while a backward all-to-all is in flight."""


@dataclass(frozen=True)
class Segment:
    """Neighbouring layers that run in the same way, without overlap across the ends of the segment.

    Attributes:
        first_layer: Megatron's global layer number, from 1.
        last_layer: number of its last layer; None for the model's last.
        num_chunks: number of chunks of a micro-batch.
        chunk_dim: dimension along which they are cut.
        range: part of the layers that runs chunk by chunk.
        chunk_multiple: sizes of the chunks along ``chunk_dim`` are multiples of this number of samples or positions.
        tiles: parts, with a message each, in which the rows of a chunk go to other ranks and back (Comet section 3: the
            experts start with the rows that are here, and outputs leave part by part); 0 for one message of all rows,
            those that stay included.
        local_tokens: with tiles, when the experts work on local tokens.
    """

    first_layer: int
    last_layer: int | None
    num_chunks: int
    chunk_dim: ChunkDim = ChunkDim.BATCH
    range: OverlapRange = OverlapRange.STACK
    chunk_multiple: int = field(default=1, metadata=OMITTED_AT_DEFAULT)
    tiles: int = field(default=0, metadata=OMITTED_AT_DEFAULT)
    local_tokens: LocalTokens = field(default=LocalTokens.HALF, metadata=OMITTED_AT_DEFAULT)

    def __post_init__(self) -> None:
        if self.tiles < 0:
            raise ValueError(f"tiles must be at least 0, not {self.tiles}")
        for name in ("num_chunks", "chunk_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.first_layer < 1 or (self.last_layer is not None and self.last_layer < self.first_layer):
            raise ValueError(f"layers {self.first_layer} to {self.last_layer} are no segment: layers count from 1")

    def __str__(self) -> str:
        multiple = f" multiple={self.chunk_multiple}" if self.chunk_multiple > 1 else ""
        tiles = f" tiles={self.tiles} local-tokens={self.local_tokens}" if self.tiles else ""
        return f"chunks={self.num_chunks} dim={self.chunk_dim} range={self.range}{multiple}{tiles}"

    def all_to_alls_per_layer(self, dispatch: Dispatch) -> int:
        """Messages with rows of a micro-batch in the forward of a layer."""
        return self.in_tiles(dispatch).all_to_alls_per_layer * self.num_chunks

    def in_tiles(self, dispatch: Dispatch) -> Dispatch:
        """The plan's dispatch as this segment has it, with its tiles."""
        return dispatch.in_tiles(self.tiles, self.local_tokens)

    @property
    def overlaps(self) -> bool:
        """Whether a chunk's message is in flight while the rank computes on other rows of the micro-batch."""
        return self.num_chunks > 1 or self.tiles > 0

    def with_layers(self, first_layer: int, last_layer: int | None) -> "Segment":
        """Other layers that run in the same way: global numbers, None for the model's last."""
        return replace(self, first_layer=first_layer, last_layer=last_layer)

    def has_layer(self, number: int) -> bool:
        """Whether the layer with this global number belongs to the segment."""
        return self.first_layer <= number and (self.last_layer is None or number <= self.last_layer)

    def chunk_sizes(self, size: int) -> list[int]:
        """Sizes of the chunks of a dimension of ``size``, as equal as possible, larger ones first."""
        return chunk_sizes(size, self.num_chunks, self.chunk_multiple)


@dataclass(frozen=True)
class Gap:
    """Weight gradients that are planned for the wait for an all-to-all.

    Attributes:
        op: the backward all-to-all, for example ``L3.c0.I.combine``.
        weight_grads: names of dWs in the order in which they run, each as often as it runs here.
    """

    op: str
    weight_grads: tuple[str, ...]


@dataclass(frozen=True)
class Pairing:
    """The backward of each micro-batch is paired with the forward of the next, see ``schedule/pairing.py``.

    At the two ends of a step a micro-batch has a forward or a backward without such a partner. With gradient
    accumulation these are the first and the last one, with pipeline stages the warm-up's and the cool-down's. They may
    run by settings of their own, such as more chunks.

    Attributes:
        end_segments: like :attr:`Plan.segments`, for these micro-batches.
        end_dw_window: like :attr:`Plan.dw_window`, for these.
        end_gaps: like :attr:`Plan.gaps`, for these.
    """

    end_segments: tuple[Segment, ...]
    end_dw_window: int = 0
    end_gaps: tuple[Gap, ...] = ()


@dataclass(frozen=True)
class Plan:
    """How each micro-batch is cut into chunks and what hides its all-to-alls.

    Attributes:
        segments: all layers of the model, in order, from layer 1.
        dw_policy: when weight gradients are computed.
        dw_window: number of backward all-to-alls that may finish before a deferred dW must have run. It bounds the
            memory that deferral keeps alive, and fixes when a parameter is reported ready for reduction: at the same
            place on every rank, independent of message times.
        dw_memory_bytes: memory that deferred dWs may keep alive on a rank; None for no bound other than the window.
            If it is full, the oldest run; that is local to the rank and does not change when parameters are reported.
        gaps: dWs that run first during certain waits; otherwise the oldest runs first. See ``DwRules.gaps`` for CUDA.
        pairing: what else holds if backwards are paired with forwards; None if micro-batches run one after the other.
        dispatch: what all-to-alls carry, in all micro-batches.
        fused_attention: whether local layers have torch's fused kernel also where chunks do not need it.
    """

    segments: tuple[Segment, ...]
    dw_policy: DwPolicy = DwPolicy.FILL
    dw_window: int = 0
    dw_memory_bytes: int | None = None
    gaps: tuple[Gap, ...] = ()
    pairing: Pairing | None = field(default=None, metadata=OMITTED_AT_DEFAULT)
    dispatch: Dispatch = field(default=PLAIN, metadata=OMITTED_AT_DEFAULT)
    fused_attention: bool = field(default=False, metadata=OMITTED_AT_DEFAULT)

    def __post_init__(self) -> None:
        if self.dw_window < (1 if self.dw_policy is DwPolicy.FILL else 0):
            raise ValueError(f"dw_window {self.dw_window} is too small for dw_policy {self.dw_policy}")
        if self.dw_memory_bytes is not None and self.dw_memory_bytes <= 0:
            raise ValueError(f"dw_memory_bytes must be above 0, not {self.dw_memory_bytes}")
        _check_segments(self.segments)
        for segment in self.segments:
            segment.in_tiles(self.dispatch)  # raises where it can't
        if self.pairing is not None:
            if not registry.has_pairing():
                raise ValueError(f"no pairs: {NO_PAIRING}. Install the whole package, or plan without pairing")
            _ = self.at_ends  # is also a plan

    def __str__(self) -> str:
        bound = "" if self.dw_memory_bytes is None else f" dw-memory={self.dw_memory_bytes / 1e6:g}MB"
        text = f"{_segments_text(self.segments)} dw={self.dw_policy} dw-window={self.dw_window}{bound}"
        if not self.dispatch.is_plain:
            text += f" dispatch={self.dispatch}"
        if self.fused_attention:
            text += " attention=fused"
        if self.pairing is None:
            return text
        ends = self.pairing
        if (ends.end_segments, ends.end_dw_window) == (self.segments, self.dw_window):
            return f"{text} paired"
        return f"{text} paired (at the ends {_segments_text(ends.end_segments)} dw-window={ends.end_dw_window})"

    @property
    def num_chunks(self) -> int:
        """The largest number of chunks of a segment, in any micro-batch."""
        return max(segment.num_chunks for segment in (*self.segments, *self.at_ends.segments))

    @property
    def delays_weight_grads(self) -> bool:
        """Whether dWs run after their layer's backward has returned: deferred, or gathered until the last tile's."""
        return self.dw_policy is DwPolicy.FILL or self.has_tiles

    @property
    def is_paired(self) -> bool:
        """Whether backwards are paired with forwards."""
        return self.pairing is not None

    @property
    def overlaps_nothing(self) -> bool:
        """Whether every all-to-all is waited for where it is launched, as in stock."""
        one_after_the_other = not self.is_paired and not any(segment.overlaps for segment in self.segments)
        return one_after_the_other and self.dw_policy is DwPolicy.NONE

    @property
    def has_tiles(self) -> bool:
        """Whether the rows of a chunk are sent in tiles in any segment of any micro-batch."""
        return any(segment.tiles for segment in (*self.segments, *self.at_ends.segments))

    @property
    def in_middle(self) -> "Plan":
        """The settings of a micro-batch whose forward and backward both have a partner, as a plan without pairing."""
        return self if self.pairing is None else replace(self, pairing=None)

    @property
    def at_ends(self) -> "Plan":
        """The settings of a micro-batch at an end of a step, as a plan without pairing."""
        if self.pairing is None:
            return self
        ends = self.pairing
        return replace(self, segments=ends.end_segments, dw_window=ends.end_dw_window, gaps=ends.end_gaps, pairing=None)

    def segment_of(self, layer: int) -> Segment:
        """The segment of the layer with this global number."""
        return next(segment for segment in self.segments if segment.has_layer(layer))

    def to_json(self) -> str:
        """The plan as indented JSON; equal plans give equal text."""
        return json.dumps({"version": PLAN_VERSION, **to_plain(self)}, indent=1)

    def fingerprint(self) -> str:
        """Short hash for comparison between ranks."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def paired(middle: Plan, ends: Plan | None = None) -> Plan:
    """A plan that pairs each backward with the next forward.

    Args:
        middle: settings of the micro-batches in the middle of a step, without pairing.
        ends: settings of those at its ends, without pairing; None for the same.
    """
    ends = ends or middle
    assert not middle.is_paired
    assert not ends.is_paired
    assert (ends.dw_policy, ends.dw_memory_bytes) == (middle.dw_policy, middle.dw_memory_bytes)
    assert ends.dispatch == middle.dispatch
    return replace(middle, pairing=Pairing(ends.segments, ends.dw_window, ends.gaps))


def _check_segments(segments: tuple[Segment, ...]) -> None:
    expected: int | None = 1
    for segment in segments:
        if segment.first_layer != expected:
            raise ValueError(f"a segment starts at layer {segment.first_layer}, expected {expected or 'none more'}")
        expected = None if segment.last_layer is None else segment.last_layer + 1
    if not segments:
        raise ValueError("a plan has at least one segment")


def _segments_text(segments: tuple[Segment, ...]) -> str:
    if len(segments) == 1:
        return str(segments[0])
    return ", ".join(f"layers {s.first_layer}-{s.last_layer or 'end'}: {s}" for s in segments) + ";"


def fixed_plan(
    num_chunks: int,
    dw_policy: DwPolicy = DwPolicy.FILL,
    chunk_dim: ChunkDim = ChunkDim.BATCH,
    overlap_range: OverlapRange = OverlapRange.STACK,
    dw_memory_bytes: int | None = None,
    chunk_multiple: int = 1,
    dispatch: Dispatch = PLAIN,
    tiles: int = 0,
    local_tokens: LocalTokens = LocalTokens.HALF,
) -> Plan:
    """A plan without a cost model: all layers run alike, and the dW window is one layer's all-to-alls.

    A larger window would keep more memory alive without reaching longer gaps.

    Args:
        dw_memory_bytes: bound on the memory that deferred dWs keep alive; None for none.
        chunk_multiple: sizes of chunks are multiples of this number of samples or positions.
        dispatch: what all-to-alls carry.
        tiles: see :class:`Segment`.
        local_tokens: see :class:`Segment`.
    """
    segment = Segment(
        1, None, num_chunks, chunk_dim, overlap_range, chunk_multiple, tiles=tiles, local_tokens=local_tokens
    )
    window = segment.all_to_alls_per_layer(dispatch) if dw_policy is DwPolicy.FILL else 0
    return Plan((segment,), dw_policy, window, dw_memory_bytes, dispatch=dispatch)


def plan_without_overlap() -> Plan:
    """One chunk, every weight gradient at once: stock's arithmetic, to the bit."""
    return fixed_plan(1, DwPolicy.NONE)
