"""Gradient buckets of a simulated backward pass: their weights and their reductions.

Buckets are filled as in Megatron's DDP: with weights from the last layer to the first, dense ones and experts apart,
up to the bucket size. Only the first virtual stage of the first pipeline stage has a bucket size. A bucket is
complete when all its weights were reported, each a window of all-to-alls after its last dW was put, or at once if the
plan defers nothing (``schedule/dw_queue.py``). Norms, routers and embeddings are not in the profile, and so not in the
buckets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, chain, pairwise
from typing import Any

from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.lowering import Step
from megatron_lancet.schedule.dw_queue import DwQueue
from megatron_lancet.schedule.ops import Compute, OpKind, Wait
from megatron_lancet.schedule.reductions import CommPriority, MicroOps, ReductionQueue

REDUCTION = "reduce."
"""Prefix of the names of reductions in timelines."""
_ELEMENT_BYTES = 4
_MAX_MICRO_OPS = 10_000
"""Limit for a bucket; simulating more would take long."""

Weight = tuple[int, str]
"""Global layer number (0 outside the layers; the first one of a repeated layer) and name."""


class WeightKind(IntEnum):
    """The ranks that sum a gradient: all data-parallel ranks, or those with the same experts."""

    DENSE = 0
    EXPERT = 1


@dataclass(frozen=True)
class Reduction:
    """The collective of a bucket, or a micro-op of it.

    Attributes:
        name: its name in timelines.
        ms: its time without other messages on the link.
        num_bytes: size of the gradients.
    """

    name: str
    kind: WeightKind
    ms: float
    num_bytes: int


@dataclass(frozen=True)
class Buckets:
    """The gradient buckets of a backward pass.

    Attributes:
        bucket_of: index of the bucket of each weight's gradient.
        num_weights: number of weights of each bucket.
        reductions: all collectives, ordered by bucket.
        first_reduction: index of each bucket's first reduction, followed by the number of reductions.
        num_puts: how often a dW of each weight is put.
        late: weights whose gradients are complete only at the end of the pass.
        num_all_to_alls: number of all-to-alls of the pass.
        chunk_bytes: size of the micro-ops that may be launched at a place between all-to-alls; None if buckets are
            launched as soon as they are complete.
    """

    bucket_of: dict[Weight, int]
    num_weights: tuple[int, ...]
    reductions: tuple[Reduction, ...]
    first_reduction: tuple[int, ...]
    num_puts: dict[Weight, int]
    late: frozenset[Weight]
    num_all_to_alls: int
    chunk_bytes: int | None

    @staticmethod
    def of(costs: CostModel, backward: Sequence[Step]) -> "Buckets | None":
        """The buckets for a backward order of ops; None if the profile has no reductions during the backward pass.

        Raises:
            UnknownCost: the profile has no all-reduce times.
            RecordError: a bucket would be cut into too many micro-ops.
        """
        rules = costs.profile.gradients
        if rules is None:
            return None
        num_puts: dict[Weight, int] = {}
        for verb, layer, action in backward:
            if verb is Compute and action.weight_grads:
                for cost in action.weight_grads[0]:
                    weight = (layer - cost.layers_back, cost.name)
                    num_puts[weight] = num_puts.get(weight, 0) + 1
        late = frozenset(weight for weight in num_puts if weight[0] == 0 and rules.has_late_head)
        # Runs of layers of one stage are virtual stages; the output layer is on the last one.
        starts = chain([False], (one != other for one, other in pairwise(costs.model.stage_of_layer)))
        run_of_layer = list(accumulate(starts))
        # The sort is stable, so weights of a layer stay in backward order.
        ordered = sorted(num_puts, key=lambda weight: (weight in late, weight[0] != 0, -weight[0]))
        runs: dict[int, list[Weight]] = {}
        for weight in ordered:
            runs.setdefault(run_of_layer[weight[0] - 1], []).append(weight)
        groups = [
            group for kind in WeightKind for run, its in runs.items() for group in _filled(costs, its, kind, run == 0)
        ]
        reductions: list[Reduction] = []
        first = [0]
        for number, (kind, weights) in enumerate(groups):
            reductions += _collectives(costs, number, kind, sum(_weight(costs, one)[1] for one in weights))
            first.append(len(reductions))
        return Buckets(
            bucket_of={weight: number for number, (_, weights) in enumerate(groups) for weight in weights},
            num_weights=tuple(len(weights) for _, weights in groups),
            reductions=tuple(reductions),
            first_reduction=tuple(first),
            num_puts=num_puts,
            late=late,
            num_all_to_alls=sum(verb is Wait for verb, _, _ in backward),
            chunk_bytes=rules.chunk_bytes if rules.priority is CommPriority.ALL_TO_ALL_FIRST else None,
        )


def _weight(costs: CostModel, weight: Weight) -> tuple[WeightKind, int]:
    """The weight's kind, and bytes of its gradient."""
    after, num_bytes = costs.gradient(*weight)
    return (WeightKind.EXPERT if after == OpKind.EXPERTS else WeightKind.DENSE), num_bytes


def _filled(
    costs: CostModel, ordered: Sequence[Weight], kind: WeightKind, has_size: bool
) -> Iterator[tuple[WeightKind, list[Weight]]]:
    rules = costs.profile.gradients
    assert rules is not None
    if (rules.dense_ranks if kind is WeightKind.DENSE else rules.expert_ranks) == 1:
        return
    bucket: list[Weight] = []
    num_bytes = 0
    for weight in ordered:
        its_kind, its_bytes = _weight(costs, weight)
        if its_kind is kind and its_bytes:
            bucket.append(weight)
            num_bytes += its_bytes
            if has_size and num_bytes >= rules.bucket_bytes:
                yield kind, bucket
                bucket, num_bytes = [], 0
    if bucket:
        yield kind, bucket


def _collectives(costs: CostModel, number: int, kind: WeightKind, num_bytes: int) -> Iterator[Reduction]:
    rules = costs.profile.gradients
    assert rules is not None
    num_ranks = rules.dense_ranks if kind is WeightKind.DENSE else rules.expert_ranks
    name = f"{REDUCTION}{kind.name.lower()}.b{number}"
    parts = [(0, num_bytes)]
    if rules.priority is CommPriority.ALL_TO_ALL_FIRST:
        if num_bytes > _MAX_MICRO_OPS * rules.chunk_bytes:
            raise RecordError(
                f"micro-ops of {rules.chunk_bytes} bytes would cut a bucket of {num_bytes} into more than "
                f"{_MAX_MICRO_OPS}: choose larger ones or smaller buckets"
            )
        cut = MicroOps(rules.chunk_bytes).cut(-(-num_bytes // _ELEMENT_BYTES), _ELEMENT_BYTES)
        parts = [(start * _ELEMENT_BYTES, min(end * _ELEMENT_BYTES, num_bytes)) for start, end in cut]
    for index, (start, end) in enumerate(parts):
        part = f"{name}.{index}" if len(parts) > 1 else name
        yield Reduction(part, kind, costs.reduction_ms(end - start, num_ranks), end - start)


class Ledger:
    """One rank's gradients in a backward pass: which are complete, and which reductions are launched when.

    Methods return the reductions to launch now, in order. The rank's queue of dWs says when a weight is reported.
    """

    def __init__(self, buckets: Buckets, dws: DwQueue[Any, Weight]) -> None:
        self._buckets = buckets
        self._dws = dws
        self._puts_left = dict(buckets.num_puts)
        self._weights_left = list(buckets.num_weights)
        self._queue: ReductionQueue[Reduction] | None = None
        if buckets.chunk_bytes is not None:
            self._queue = ReductionQueue(buckets.chunk_bytes, buckets.num_all_to_alls)

    def put(self, weight: Weight) -> list[Reduction]:
        """Notes that a dW of ``weight`` was put, and without deferral has run."""
        self._puts_left[weight] -= 1
        if self._puts_left[weight] or weight in self._buckets.late:
            return []
        return self._report(self._dws.mark_last_use(weight))

    def issue(self) -> None:
        """Notes that a backward all-to-all was issued."""
        if self._queue is not None:
            self._queue.issue()

    def advance(self, kind: str) -> list[Reduction]:
        """Notes that a backward all-to-all of this kind was waited for, and the dWs that were due have run."""
        launched = self._report(self._dws.take_reports())
        return launched if self._queue is None else launched + self._queue.advance(kind)

    def end(self) -> list[Reduction]:
        """Notes that the backward pass has ended, and all dWs have run."""
        launched = self._report([*self._dws.flush_reports(), *self._buckets.late])
        assert not any(self._weights_left), "a gradient was never complete"
        return launched if self._queue is None else launched + self._queue.take_all()

    def _report(self, weights: Sequence[Weight]) -> list[Reduction]:
        launched: list[Reduction] = []
        for weight in weights:
            bucket = self._buckets.bucket_of.get(weight)
            if bucket is None:  # it is on one rank only
                continue
            self._weights_left[bucket] -= 1
            if self._weights_left[bucket] == 0:
                first, end = self._buckets.first_reduction[bucket : bucket + 2]
                its = self._buckets.reductions[first:end]
                launched += its if self._queue is None else self._queue.put(its)
        return launched
