"""Estimates of the costs of chunks, which a stock run does not have.

An op of a chunk takes the part of its time that each launch costs, and of the rest its share of the tokens. Of the
attention's core a chunk of positions takes its share of the pairs of a query and an earlier key: a core of separate
products computes all pairs of an unchunked micro-batch, of which chunks leave the later keys out; a fused one computes
only the pairs that count.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megatron_lancet.lab.from_trace.events import RankEvents
from megatron_lancet.planning.measured.op_times import OpKey
from megatron_lancet.planning.profile import ModelFacts, OpTime, WeightGradTime
from megatron_lancet.schedule.chunk_sizes import chunk_sizes, most_chunks
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.plan import ChunkDim

_CHUNK_COUNTS = (2, 4)
_MIN_TOKENS_OF_CHUNK = 16
"""As in the profiler: smaller chunks are not worth it."""


@dataclass(frozen=True)
class OpShares:
    """Shares of an op's time.

    Attributes:
        scaled: in calls that grow with the tokens.
        core: of these in the attention's core.
    """

    scaled: float
    core: float


def cuts_of(model: ModelFacts, ranks: Iterable[RankEvents]) -> list[tuple[ChunkDim, int]]:
    """The cuts that are estimated: those that the profiler would measure."""
    tokens = model.micro_batch_size * model.seq_length
    # The positions of a rank are then a part of the sequence, and the run refuses to cut them.
    is_part = any(rank.group_size(name) > 1 for rank in ranks for name in ("TENSOR_MODEL_PARALLEL", "CONTEXT_PARALLEL"))
    return [
        (dim, count)
        for dim in ((ChunkDim.BATCH,) if is_part else ChunkDim)
        for count in _CHUNK_COUNTS
        if count <= most_chunks(model.size_along(dim)[0], 1) and tokens // count >= _MIN_TOKENS_OF_CHUNK
    ]


def with_chunks(
    ops: Sequence[OpTime],
    shares: Mapping[OpKey, OpShares],
    model: ModelFacts,
    cuts: Sequence[tuple[ChunkDim, int]],
    is_fused: bool,
) -> tuple[OpTime, ...]:
    """The times of unchunked micro-batches, and of the chunks of all cuts.

    Args:
        cuts: see :func:`cuts_of`.
        is_fused: whether the attention's core is one op.
    """
    found = list(ops)
    for op in ops:
        if op.layer_kind is not LayerKind.NONE:
            of = shares[OpKey(op.layer_kind, op.kind, op.phase, op.chunk_dim, op.num_chunks, op.chunk, op.dispatch)]
            found += [chunk for dim, count in cuts for chunk in _chunks(op, of, dim, count, model, is_fused)]
    return tuple(found)


def _chunks(
    op: OpTime, shares: OpShares, dim: ChunkDim, count: int, model: ModelFacts, is_fused: bool
) -> Iterator[OpTime]:
    size, _ = model.size_along(dim)
    sizes = chunk_sizes(size, count)
    for chunk, (own, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        part = own / size
        pairs = part
        if dim is ChunkDim.SEQUENCE:
            pairs *= (2 * end - own if is_fused else end) / size
        scaled = (shares.scaled - shares.core) * part + shares.core * pairs
        ms = op.ms * (1 - shares.scaled + scaled)
        rows = round(op.rows * part)
        yield replace(op, chunk_dim=dim, num_chunks=count, chunk=chunk, rows=rows, ms=round(ms, 5))


def weight_grads_with_chunks(
    times: Sequence[WeightGradTime], cuts: Sequence[tuple[ChunkDim, int]]
) -> tuple[WeightGradTime, ...]:
    """The times of unchunked micro-batches, and a chunk's share of them, in each layer's order."""
    counts = sorted({count for _, count in cuts})
    found = list(times)
    for count in counts:
        found += [
            replace(
                one,
                num_chunks=count,
                rows=round(one.rows / count),
                ms=round(one.ms / count, 5),
                pinned_bytes=round(one.pinned_bytes / count),
            )
            for one in times
            if one.layer_kind is not LayerKind.NONE
        ]
    return tuple(found)
