"""Steps of a histogram of documents' lengths, packed in several ways, and what they take on the machine of a profile.

The documents of a step are the same in all ways. The way without packing, one document a row and each row padded to the
sequence length, has micro-batches of as many rows as the profile's and as many of them as it needs; the other ways have
the profile's number of micro-batches.

With pipelines a step is 1F1B's: the sum over columns and (stages - 1) times the longest.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from statistics import fmean

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.what_if.document_times import ColumnTimes, MicroBatch
from megatron_lancet.planning.documents.bins import Dealing, balanced
from megatron_lancet.planning.documents.cost import DocumentCost
from megatron_lancet.schedule.plan import Plan

Drawn = Sequence[Sequence[int]]
"""Tokens of the documents of a step, per data-parallel rank."""

Ranks = Sequence[Sequence[MicroBatch]]
"""Micro-batches of a step, per data-parallel rank; equally many on each."""

type Packing = Callable[[Drawn], Ranks]
"""A way of packing."""


@dataclass(frozen=True)
class Setting:
    """The documents and settings of a step.

    Attributes:
        num_ranks: data-parallel ranks.
        ep_size: ranks of an expert-parallel group; neighbours.
        num_stages: pipeline stages.
        num_micro_batches: micro-batches of a step on each rank.
        num_documents: documents of a step on each rank.
        num_rows: samples of a micro-batch without packing.
        seq_length: longest document, and the length of each sample without packing.
    """

    num_ranks: int
    ep_size: int
    num_stages: int
    num_micro_batches: int
    num_documents: int
    num_rows: int
    seq_length: int

    @property
    def max_tokens(self) -> int:
        """Tokens of a full bin."""
        return self.num_rows * self.seq_length


@dataclass(frozen=True)
class PackedStep:
    """The prediction of one way of packing.

    Attributes:
        step_ms: mean over the drawn steps.
        tokens_per_s: of documents, on all ranks.
        over_first: ``tokens_per_s`` over the first way's.
        spread: by how much the quickest rank's compute of a micro-batch is below the slowest rank's, relative to that;
            mean over micro-batches, weighted by the latter.
        padding: share of the computed positions that belong to no document.
        num_micro_batches: mean over the drawn steps.
    """

    name: str
    step_ms: float
    tokens_per_s: float
    over_first: float
    spread: float
    padding: float
    num_micro_batches: float


@dataclass(frozen=True)
class Packings:
    """Predictions of steps of documents, in all ways of packing.

    Attributes:
        mean_length: tokens of a document, at most the sequence length.
        cost: by which documents are dealt to bins.
        num_steps: drawn steps of each way.
    """

    plan: Plan
    setting: Setting
    mean_length: float
    cost: DocumentCost
    num_steps: int
    steps: tuple[PackedStep, ...]


def in_steps(histogram: Mapping[int, int], seq_length: int) -> dict[int, int]:
    """Tokens that a model sees of documents: one less, whose label comes after it, and at most ``seq_length``.

    Raises:
        UsageError: nothing is left of any document.
    """
    seen: dict[int, int] = {}
    for length, count in histogram.items():
        if length > 1:
            tokens = min(length - 1, seq_length)
            seen[tokens] = seen.get(tokens, 0) + count
    if not seen:
        raise UsageError("no document has two tokens, a token and its label; a step would have no label")
    return seen


def documents_that_fill(histogram: Mapping[int, int], num_tokens: float) -> int:
    """Number of documents that have ``num_tokens`` in the mean.

    Args:
        histogram: of :func:`in_steps`.
    """
    mean = sum(length * count for length, count in histogram.items()) / sum(histogram.values())
    return round(num_tokens / mean)


def draw(histogram: Mapping[int, int], setting: Setting, num_steps: int, seed: int) -> list[Drawn]:
    """Documents of that many steps, drawn with replacement."""
    dice = random.Random(seed)  # noqa: S311 - draws documents, keeps no secret
    lengths, limits = list(histogram), list(accumulate(histogram.values()))
    return [
        [dice.choices(lengths, cum_weights=limits, k=setting.num_documents) for _ in range(setting.num_ranks)]
        for _ in range(num_steps)
    ]


def packings(setting: Setting, cost: DocumentCost) -> dict[str, Packing]:
    """The ways of packing, by name; the others are compared with the first."""
    num_bins, most = setting.num_micro_batches, setting.max_tokens

    def rows(drawn: Drawn) -> Ranks:
        of_rank = setting.num_documents
        sizes = [min(setting.num_rows, of_rank - first) for first in range(0, of_rank, setting.num_rows)]
        return [[MicroBatch.padded(size, setting.seq_length) for size in sizes] for _ in drawn]

    def on_each_rank(drawn: Drawn) -> Ranks:
        alone = ([lengths] for lengths in drawn)
        return [_micro_batches(one, balanced(one, num_bins, cost, most))[0] for one in alone]

    return {
        "balanced on each rank": on_each_rank,
        "balanced over all ranks": lambda drawn: _micro_batches(drawn, balanced(drawn, num_bins, cost, most)),
        f"padded to {setting.seq_length}": rows,
    }


def _micro_batches(drawn: Drawn, dealing: Dealing) -> Ranks:
    lengths = list(chain.from_iterable(drawn))
    return [[MicroBatch.packed([lengths[index] for index in indices]) for indices in rank] for rank in dealing.bins]


def predict_packings(
    steps: Sequence[Drawn], setting: Setting, ways: Mapping[str, Packing], times: ColumnTimes, beside_ms: float
) -> list[PackedStep]:
    """Predicts the steps in each way of packing.

    Args:
        ways: by name; the others are compared with the first.
        beside_ms: of a step next to its micro-batches: optimizer and reductions that nothing hides.

    Raises:
        UsageError: there are fewer documents than micro-batches.
        RecordError: the profile has no times for the plan.
    """
    if setting.num_documents < setting.num_micro_batches:
        raise UsageError(
            f"{setting.num_documents} documents of a step on a rank are fewer than its {setting.num_micro_batches} "
            "micro-batches; pass --step-documents or --num-micro-batches"
        )
    num_tokens = sum(sum(map(sum, drawn)) for drawn in steps)
    found = []
    for name, pack in ways.items():
        packed = [pack(drawn) for drawn in steps]
        step_ms = [_step_ms(ranks, setting, times) + beside_ms for ranks in packed]
        computed = sum(batch.num_tokens for ranks in packed for batch in chain.from_iterable(ranks))
        tokens_per_s = num_tokens / sum(step_ms) * 1e3
        spread = _spread(packed, setting, times)
        num_columns = fmean(len(ranks[0]) for ranks in packed)
        found.append((name, fmean(step_ms), tokens_per_s, spread, 1 - num_tokens / computed, num_columns))
    first = found[0][2]
    return [PackedStep(*one[:3], one[2] / first, *one[3:]) for one in found]


def _groups(ranks: Ranks, ep_size: int) -> list[list[tuple[MicroBatch, ...]]]:
    """The columns of each expert-parallel group."""
    return [list(zip(*ranks[first : first + ep_size], strict=True)) for first in range(0, len(ranks), ep_size)]


def _step_ms(ranks: Ranks, setting: Setting, times: ColumnTimes) -> float:
    """Time of a step's micro-batches; the groups wait for each other at its end."""
    of_groups = []
    for columns in _groups(ranks, setting.ep_size):
        column_ms = [times.column_ms(column) for column in columns]
        of_groups.append(sum(column_ms) + (setting.num_stages - 1) * max(column_ms))
    return max(of_groups)


def _spread(packed: Sequence[Ranks], setting: Setting, times: ColumnTimes) -> float:
    columns = [column for ranks in packed for group in _groups(ranks, setting.ep_size) for column in group]
    compute = [times.compute_ms(column) for column in columns]
    return 1 - sum(map(min, compute)) / sum(map(max, compute))
