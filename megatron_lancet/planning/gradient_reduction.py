"""How a run sums its gradients over ranks while its backward pass goes on, as data."""

from dataclasses import dataclass

from megatron_lancet.schedule.reductions import DEFAULT_CHUNK_MB, CommPriority

_BYTES_PER_MB = 1e6
_ELEMENTS_OF_A_BUCKET = 40_000_000
"""Megatron's default, and at least a million for each rank."""
_ELEMENT_BYTES = 4


def default_bucket_bytes(num_ranks: int) -> int:
    """Megatron's default size of a bucket of float32 gradients that ``num_ranks`` ranks sum."""
    return _ELEMENT_BYTES * max(_ELEMENTS_OF_A_BUCKET, 1_000_000 * num_ranks)


@dataclass(frozen=True)
class GradientReduction:
    """Megatron's overlap-grad-reduce, as far as a schedule depends on it.

    Attributes:
        dense_ranks: that sum gradients of dense weights; the profile's all-reduce times are of so many.
        expert_ranks: that sum gradients of the same experts.
        priority: who gets the wire when all-to-alls want it too.
        bucket_bytes: a bucket is full when its gradients have as much.
        chunk_bytes: of a micro-op, at most; with the priority only.
        is_scatter: gradients are reduce-scattered (distributed optimizer), which is half an all-reduce.
        has_late_head: the output layer's weight is the embedding's too, so that its gradient is complete only when the
            backward pass ends.
    """

    dense_ranks: int
    expert_ranks: int = 1
    priority: CommPriority = CommPriority.OFF
    bucket_bytes: int = _ELEMENT_BYTES * _ELEMENTS_OF_A_BUCKET
    chunk_bytes: int = round(DEFAULT_CHUNK_MB * _BYTES_PER_MB)
    is_scatter: bool = False
    has_late_head: bool = False

    def __post_init__(self) -> None:
        for name in ("dense_ranks", "expert_ranks", "bucket_bytes", "chunk_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def ring_factor(self, num_ranks: int) -> float:
        """What a reduction over ``num_ranks`` takes, as a part of an all-reduce over the dense ranks (a ring)."""
        if num_ranks == 1:
            return 0.0
        part = (num_ranks - 1) / num_ranks / ((self.dense_ranks - 1) / self.dense_ranks)
        return part / 2 if self.is_scatter else part
