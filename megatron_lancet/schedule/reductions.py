"""Gradient reductions in parts: who goes first on the wire, and how a bucket is cut (Lina, training part).

A running collective can't be preempted, so what may be launched between two all-to-alls must be small.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_CHUNK_MB = 30.0
"""Lina's size of a micro-op."""
_ALIGNMENT = 64
"""Elements: parts that begin at round addresses are copied and reduced faster."""


class CommPriority(StrEnum):
    """Who gets the wire when gradient reductions and all-to-alls want it."""

    OFF = "off"
    """Whoever comes: Megatron starts a bucket's reduction as soon as its gradients are complete."""
    ALL_TO_ALL_FIRST = "all-to-all-first"
    """Reductions run in micro-ops, and only where no all-to-all is in flight or about to start."""


@dataclass(frozen=True)
class MicroOps:
    """How gradient reductions are cut; ranks that share a wire must agree about it.

    Attributes:
        chunk_bytes: most gradient bytes of a micro-op, and of all that are launched at one place.
    """

    chunk_bytes: int

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be at least 1, not {self.chunk_bytes}")

    def cut(self, num_elements: int, element_bytes: int, num_shards: int = 1) -> Iterator[tuple[int, int]]:
        """The micro-ops of a bucket: (start, end) in each of its shards.

        A reduce-scatter leaves each rank one shard of the bucket. The c-th micro-op reduces the c-th part of every
        shard, so that each element goes to the rank that owns it and is summed up as in the whole.

        Args:
            num_elements: of the bucket, a multiple of ``num_shards``.
            num_shards: ranks of a reduce-scatter; 1 for an all-reduce.
        """
        assert num_elements % num_shards == 0
        shard = num_elements // num_shards
        step = max(1, self.chunk_bytes // (element_bytes * num_shards))
        if step > _ALIGNMENT:
            step -= step % _ALIGNMENT
        for start in range(0, shard, step):
            yield start, min(start + step, shard)
