"""Gradient reductions during all-to-alls: priority, micro-ops of a bucket, and when they are launched.

A running collective can't be preempted, so reductions between two all-to-alls must be small (Lina, training part).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Protocol

from megatron_lancet.files.reader import MAX_COUNT, Range
from megatron_lancet.schedule.ops import COMBINES, DISPATCHES, OpKind
from megatron_lancet.units import mb_to_bytes

DEFAULT_CHUNK_MB = 30.0
"""Lina's size of a micro-op."""
_ALIGNMENT = 64
"""In elements; aligned parts are copied and reduced faster."""
_ELEMENTS_OF_A_BUCKET = 40_000_000
"""Megatron's default, and at least a million for each rank."""
_ELEMENT_BYTES = 4
_BEFORE_PLACE = (DISPATCHES | COMBINES) - {OpKind.LOCAL_DISPATCH, OpKind.NODE_COMBINE}
"""Kinds of the backward all-to-all after which reductions may be launched; of two hops, the second."""


class CommPriority(StrEnum):
    """Order of gradient reductions and all-to-alls on the network."""

    OFF = "off"
    """First come, first served: Megatron launches a bucket's reduction when its gradients are complete."""
    ALL_TO_ALL_FIRST = "all-to-all-first"
    """Reductions run in micro-ops, which are launched only where no all-to-all is in flight."""


@dataclass(frozen=True)
class MicroOps:
    """How gradient reductions are cut; it must be the same on ranks that share a network.

    Attributes:
        chunk_bytes: most gradient bytes of a micro-op, and of all micro-ops launched at one place.
    """

    chunk_bytes: int

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be at least 1, not {self.chunk_bytes}")

    def cut(self, num_elements: int, element_bytes: int, num_shards: int = 1) -> Iterator[tuple[int, int]]:
        """Yields the micro-ops of a bucket: (start, end) in elements, in each of its shards.

        A reduce-scatter gives each rank one shard of the bucket. The c-th micro-op reduces the c-th part of every
        shard, so that each element goes to the rank that owns it and is summed as in the whole bucket.

        Args:
            num_elements: size of the bucket, a multiple of ``num_shards``.
            element_bytes: size of an element.
            num_shards: number of ranks of a reduce-scatter; 1 for an all-reduce.
        """
        assert num_elements % num_shards == 0
        shard = num_elements // num_shards
        step = max(1, self.chunk_bytes // (element_bytes * num_shards))
        if step > _ALIGNMENT:
            step -= step % _ALIGNMENT
        for start in range(0, shard, step):
            yield start, min(start + step, shard)


def default_bucket_bytes(num_ranks: int) -> int:
    """Megatron's default size of a bucket of float32 gradients that ``num_ranks`` ranks sum."""
    return _ELEMENT_BYTES * max(_ELEMENTS_OF_A_BUCKET, 1_000_000 * num_ranks)


@dataclass(frozen=True)
class GradientReduction:
    """Megatron's overlap-grad-reduce, as far as a schedule depends on it.

    Attributes:
        dense_ranks: number of ranks that sum gradients of dense weights, and of the profile's all-reduce times.
        expert_ranks: number of ranks that sum gradients of the same experts.
        priority: order of reductions and all-to-alls.
        bucket_bytes: size of gradients at which a bucket is full.
        chunk_bytes: largest size of a micro-op; used with ``ALL_TO_ALL_FIRST`` only.
        is_scatter: whether gradients are reduce-scattered (distributed optimizer), which is half an all-reduce.
        has_late_head: whether the output layer shares its weight with the embedding, so that its gradient is complete
            only when the backward pass ends.
    """

    dense_ranks: Annotated[int, Range(1, MAX_COUNT)]
    expert_ranks: Annotated[int, Range(1, MAX_COUNT)] = 1
    priority: CommPriority = CommPriority.OFF
    bucket_bytes: int = _ELEMENT_BYTES * _ELEMENTS_OF_A_BUCKET
    chunk_bytes: int = mb_to_bytes(DEFAULT_CHUNK_MB)
    is_scatter: bool = False
    has_late_head: bool = False

    def __post_init__(self) -> None:
        for name in ("dense_ranks", "expert_ranks", "bucket_bytes", "chunk_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def ring_factor(self, num_ranks: int) -> float:
        """Time of a ring reduction over ``num_ranks``, relative to an all-reduce over the dense ranks."""
        if num_ranks == 1:
            return 0.0
        part = (num_ranks - 1) / num_ranks / ((self.dense_ranks - 1) / self.dense_ranks)
        return part / 2 if self.is_scatter else part


class _Sized(Protocol):
    """A part of a gradient reduction."""

    @property
    def num_bytes(self) -> int:
        """Size of the gradients that it reduces."""


class ReductionQueue[PartT: _Sized]:
    """Micro-ops that wait for a *place* in the backward pass where they may be launched.

    Places are fixed points of the backward pass:

    - *between all-to-alls*: a backward all-to-all was waited for, and no other is in flight. Up to the next one only a
      layer's attention or its experts are computed. As many micro-ops are launched as fit into ``chunk_bytes``.
    - *the end*: no further all-to-all is expected in this backward pass, or the gradients are waited for. All are
      launched.

    The micro-ops of a place depend on sizes and on the order of autograd, never on the clock. So the order of
    collectives is the same on every rank. The queue is bookkeeping only: its methods return the micro-ops to launch
    now, in order, and the caller does it.
    """

    def __init__(self, chunk_bytes: int, num_to_come: int = 0) -> None:
        """
        Args:
            chunk_bytes: size of the micro-ops that may be launched at a place between all-to-alls.
            num_to_come: number of backward all-to-alls that are expected.
        """
        self._chunk_bytes = chunk_bytes
        self._num_to_come = num_to_come
        self._num_in_flight = 0
        self._parts: deque[PartT] = deque()

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def is_at_end(self) -> bool:
        """Whether no further all-to-all is expected in this backward pass."""
        return self._num_to_come <= 0

    def expect_backward(self) -> None:
        """Notes that the backward pass will have one more all-to-all."""
        self._num_to_come += 1

    def issue(self) -> None:
        """Notes that a backward all-to-all was issued."""
        self._num_in_flight += 1

    def advance(self, kind: str) -> list[PartT]:
        """Notes that a backward all-to-all of this kind was waited for, and its gradients were put."""
        self._num_in_flight -= 1
        self._num_to_come -= 1
        assert self._num_in_flight >= 0
        if self.is_at_end:
            return self.take_all()
        if self._num_in_flight or kind not in _BEFORE_PLACE:
            return []
        room_bytes, taken = self._chunk_bytes, []
        while self._parts and self._parts[0].num_bytes <= room_bytes:
            room_bytes -= self._parts[0].num_bytes
            taken.append(self._parts.popleft())
        return taken

    def put(self, parts: Iterable[PartT]) -> list[PartT]:
        """Adds the micro-ops of a reduction whose gradients are complete."""
        self._parts.extend(parts)
        return self.take_all() if self.is_at_end else []

    def take_all(self) -> list[PartT]:
        """Removes and returns all micro-ops, for example because the gradients are waited for."""
        taken = list(self._parts)
        self._parts.clear()
        return taken

    def forget_expected(self) -> None:
        """Drops the expected all-to-alls: forward passes without a backward pass may have announced some."""
        self._num_to_come = self._num_in_flight = 0
