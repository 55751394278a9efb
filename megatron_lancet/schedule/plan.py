"""A plan: everything about the overlap that all ranks must agree on, as data."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum

PLAN_VERSION = 2
ALL_TO_ALLS_PER_LAYER = 2
"""Dispatch and combine."""


class ChunkDim(StrEnum):
    """The tensor dimension along which a micro-batch is split into chunks."""

    BATCH = "batch"
    """Samples. Nothing of attention is shared between chunks."""
    SEQUENCE = "sequence"
    """Positions. A chunk attends to the keys and values of the chunks before it, so causal attention stays exact."""


class OverlapRange(StrEnum):
    """The part of the model that runs chunk by chunk (Lancet section 5: partition ranges)."""

    EXPERTS = "experts"
    """Dispatch to combine: the router has seen the whole micro-batch before."""
    GATE = "gate"
    """From the router to combine."""
    LAYER = "layer"
    """A layer with its attention; chunks wait for each other at its end."""
    STACK = "stack"
    """All layers of the pipeline stage, dense ones too."""

    @property
    def has_attention(self) -> bool:
        """Whether attention runs on chunks too."""
        return self in (OverlapRange.LAYER, OverlapRange.STACK)


class DwPolicy(StrEnum):
    """What happens to the weight gradients (dW) of linear layers in the backward pass."""

    NONE = "none"
    """Computed at once, as in stock Megatron."""
    FILL = "fill"
    """Deferred, and run while a backward all-to-all is in flight."""


@dataclass(frozen=True)
class Plan:
    """How each micro-batch is cut and what hides its all-to-alls.

    Attributes:
        num_chunks: chunks of a micro-batch that are in flight together.
        chunk_dim: dimension along which they are cut.
        range: which part of the model runs chunk by chunk.
        dw_policy: what fills the backward all-to-alls besides the other chunks.
        dw_window: number of backward all-to-alls that may finish before a deferred dW must have run. It bounds
            the memory that deferral pins, and fixes when a parameter is reported ready for reduction: the
            same place on every rank, however long the messages took.
        dw_memory_bytes: memory that deferred dWs may keep alive on a rank, None for no bound other than the window.
            The oldest run first when it is full; that is local and moves no report.
    """

    num_chunks: int
    chunk_dim: ChunkDim = ChunkDim.BATCH
    range: OverlapRange = OverlapRange.STACK
    dw_policy: DwPolicy = DwPolicy.FILL
    dw_window: int = 0
    dw_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        assert self.num_chunks >= 1
        assert self.dw_window >= 0
        assert self.dw_memory_bytes is None or self.dw_memory_bytes > 0

    def __str__(self) -> str:
        bound = "" if self.dw_memory_bytes is None else f" dw-memory={self.dw_memory_bytes / 1e6:g}MB"
        return (
            f"chunks={self.num_chunks} dim={self.chunk_dim} range={self.range} "
            f"dw={self.dw_policy} dw-window={self.dw_window}{bound}"
        )

    def to_json(self) -> str:
        """The plan as JSON text with sorted keys: equal plans give equal text."""
        return json.dumps({"version": PLAN_VERSION, **asdict(self)}, sort_keys=True)

    def fingerprint(self) -> str:
        """Short hash of the plan, for comparison between ranks."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def chunk_sizes(self, size: int) -> list[int]:
        """Sizes of the chunks of a dimension of ``size``, as equal as possible, larger ones first."""
        assert size >= self.num_chunks
        base, rest = divmod(size, self.num_chunks)
        return [base + (chunk < rest) for chunk in range(self.num_chunks)]

    def turns(self) -> Iterator[int]:
        """Whose turn it is, without end: the chunks go on one after the other, in order.

        A chunk's turn lasts until one of its collectives is in flight. Every chunk takes the same number of
        turns, so this is the order of the collectives on every rank, whatever the tokens do; and the last
        chunk reaches every router last.
        """
        while True:
            yield from range(self.num_chunks)


def fixed_plan(
    num_chunks: int,
    dw_policy: DwPolicy = DwPolicy.FILL,
    chunk_dim: ChunkDim = ChunkDim.BATCH,
    overlap_range: OverlapRange = OverlapRange.STACK,
    dw_memory_bytes: int | None = None,
) -> Plan:
    """A plan without a cost model: a dW may be carried over one layer's all-to-alls.

    Over more it would pin memory without finding a longer gap.

    Args:
        dw_memory_bytes: bound of what deferred dWs keep alive, None for none.
    """
    window = ALL_TO_ALLS_PER_LAYER * num_chunks if dw_policy is DwPolicy.FILL else 0
    return Plan(num_chunks, chunk_dim, overlap_range, dw_policy, window, dw_memory_bytes)
