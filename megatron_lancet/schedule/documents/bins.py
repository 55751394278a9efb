"""Documents dealt to the micro-batches of a step, over all ranks: a bin is what one rank computes in one micro-batch.

With expert parallelism all ranks of a group wait for each other in every micro-batch, so the bins that run at the same
time, a column, should take equal time, and every rank must have the same number of bins.

Samples are numbered rank after rank in the order drawn: of ``drawn`` = [[5, 7], [3]], sample 2 has 3 tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_lancet.schedule.documents.cost import DocumentCost
from megatron_lancet.schedule.documents.largest_first import largest_first
from megatron_lancet.schedule.documents.padded_groups import padded_groups

Bin = tuple[int, ...]
"""Indices of samples, ascending."""


@dataclass(frozen=True)
class Dealing:
    """Which samples each rank computes in which micro-batch.

    Attributes:
        bins: per rank and micro-batch, the samples. Every sample is in one bin, and no bin is empty.
        max_tokens: bound on the tokens of a bin, padding included: the caller's, or a higher one where the samples do
            not fit that one.
        is_padded: whether the samples of a bin are padded to the longest of them, in place of one after the other.
    """

    bins: tuple[tuple[Bin, ...], ...]
    max_tokens: int
    is_padded: bool = False


@dataclass(frozen=True)
class Prediction:
    """What a dealing costs, in the units of :class:`DocumentCost`.

    Attributes:
        bin_costs: per rank and micro-batch.
        step: cost of the step, where all ranks wait for the last one in every micro-batch.
        spread: by how much the quickest rank's bin is below the slowest rank's, over the latter; the mean over
            micro-batches, weighted by their times. 0 where no rank waits.
        waiting: mean share of the step in which a rank waits for others.
        num_tokens: tokens of the samples.
        padding: padding between the samples of bins, over all tokens of the bins.
    """

    bin_costs: tuple[tuple[float, ...], ...]
    step: float
    spread: float
    waiting: float
    num_tokens: int
    padding: float


def balanced(drawn: Sequence[Sequence[int]], num_bins: int, cost: DocumentCost, max_tokens: int) -> Dealing:
    """Deal the samples of all ranks so that the bins of a column take nearly the same time on all of them.

    The sum over columns of the slowest bin is kept small, and the largest bin of all as well: the two terms of a step's
    time, in a pipeline, too.

    Args:
        drawn: per rank, tokens of its samples in the order drawn.
        num_bins: micro-batches of the step, on every rank.
        cost: of a document.
        max_tokens: bound on the tokens of a bin. It is raised to the least bound that was found where the samples do
            not fit.

    Raises:
        ValueError: there are fewer samples than bins.
    """
    lengths = _lengths(drawn, num_bins)
    costs = [cost.of(length) for length in lengths]
    groups, bound = largest_first(lengths, costs, len(drawn), num_bins, max_tokens)
    return Dealing(_columns(groups, costs, len(drawn)), bound)


def first_fit(drawn: Sequence[Sequence[int]], num_bins: int, max_tokens: int) -> Dealing:
    """Pack each rank's own samples in the order drawn, each into the first bin that has room for it.

    A sample for which no bin has room goes to the bin with the fewest tokens, which then exceeds the bound. The last
    samples go to empty bins if there are no more samples than empty bins.

    Args:
        drawn: as for :func:`balanced`.
        num_bins: micro-batches of the step, on every rank.
        max_tokens: tokens of a full bin.

    Raises:
        ValueError: a rank has fewer samples than bins.
    """
    bins, bound, first = [], max_tokens, 0
    for rank, lengths in enumerate(drawn):
        if len(lengths) < num_bins:
            raise ValueError(f"{num_bins} bins need at least as many samples, and rank {rank} drew {len(lengths)}")
        packed, loads = _packed(lengths, num_bins, max_tokens)
        bins.append(tuple(tuple(first + index for index in indices) for indices in packed))
        bound = max(bound, *loads)
        first += len(lengths)
    return Dealing(tuple(bins), bound)


def padded(
    drawn: Sequence[Sequence[int]], num_bins: int, cost: DocumentCost, max_tokens: int, num_stages: int = 1
) -> Dealing:
    """Deal samples of like length to bins whose samples are padded to the longest, for attention without packing.

    This is the dynamic program of DynaPipe (EuroSys 2024, section 4) over samples sorted by length, with a fixed number
    of micro-batches: with expert parallelism all ranks must have as many.

    Args:
        drawn: as for :func:`balanced`.
        num_bins: micro-batches of the step, on every rank.
        cost: of a document.
        max_tokens: bound on the tokens of a bin with its padding. It is raised to the least that fits.
        num_stages: stages of the pipeline; the more, the more the largest bin counts.

    Raises:
        ValueError: there are fewer samples than bins.
    """
    lengths = _lengths(drawn, num_bins)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    descending = [lengths[index] for index in order]
    candidates: list[tuple[float, int, Dealing]] = []
    costs_of_samples = [cost.of(length) for length in descending]
    groups_of_bounds, bound = padded_groups(descending, costs_of_samples, len(drawn), num_bins, max_tokens)
    for places in groups_of_bounds:
        groups = [[order[place] for place in group] for group in places]
        longest = [max(lengths[index] for index in group) for group in groups]
        costs = [len(group) * cost.of(length) for group, length in zip(groups, longest, strict=True)]
        by_sample = {index: costs[place] / len(group) for place, group in enumerate(groups) for index in group}
        dealing = Dealing(_columns(groups, by_sample, len(drawn)), bound, is_padded=True)
        candidates.append((predicted(drawn, dealing, cost, num_stages).step, len(candidates), dealing))
    return min(candidates)[2]


def bin_tokens(drawn: Sequence[Sequence[int]], dealing: Dealing) -> tuple[tuple[int, ...], ...]:
    """Tokens per rank and micro-batch, with the padding between the samples of a padded bin."""
    lengths = list(chain.from_iterable(drawn))
    return tuple(tuple(_tokens(lengths, indices, dealing.is_padded) for indices in rank) for rank in dealing.bins)


def predicted(drawn: Sequence[Sequence[int]], dealing: Dealing, cost: DocumentCost, num_stages: int = 1) -> Prediction:
    """What a dealing costs where all ranks wait for the last one in every micro-batch.

    Args:
        drawn: the samples that were dealt.
        dealing: of any of this file's functions.
        cost: of a document.
        num_stages: stages of the pipeline. The step is the sum over micro-batches and ``num_stages - 1`` times the
            longest of them (1F1B).
    """
    lengths = list(chain.from_iterable(drawn))

    def cost_of(indices: Bin) -> float:
        if dealing.is_padded:
            return len(indices) * cost.of(max(lengths[index] for index in indices))
        return sum(cost.of(lengths[index]) for index in indices)

    bin_costs = tuple(tuple(cost_of(indices) for indices in rank) for rank in dealing.bins)
    columns = list(zip(*bin_costs, strict=True))
    slowest = [max(column) for column in columns]
    computed = sum(chain.from_iterable(bin_costs)) / len(drawn)
    step = sum(slowest) + (num_stages - 1) * max(slowest)
    tokens = sum(chain.from_iterable(bin_tokens(drawn, dealing)))
    return Prediction(
        bin_costs=bin_costs,
        step=step,
        spread=1 - sum(min(column) for column in columns) / sum(slowest),
        waiting=1 - computed / step,
        num_tokens=sum(lengths),
        padding=1 - sum(lengths) / tokens,
    )


def _lengths(drawn: Sequence[Sequence[int]], num_bins: int) -> list[int]:
    lengths = list(chain.from_iterable(drawn))
    if len(lengths) < len(drawn) * num_bins:
        raise ValueError(
            f"{num_bins} bins on each of {len(drawn)} ranks need at least {len(drawn) * num_bins} samples, "
            f"and there are {len(lengths)}"
        )
    return lengths


def _packed(lengths: Sequence[int], num_bins: int, max_tokens: int) -> tuple[list[list[int]], list[int]]:
    """One rank's samples packed first fit, and the tokens of its bins."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for index, length in enumerate(lengths):
        empty = [place for place in range(num_bins) if not bins[place]]
        if len(empty) == len(lengths) - index:
            place = empty[0]
        else:
            fitting = (place for place in range(num_bins) if loads[place] + length <= max_tokens)
            place = next(fitting, min(range(num_bins), key=loads.__getitem__))
        bins[place].append(index)
        loads[place] += length
    return bins, loads


def _columns(
    groups: Sequence[Sequence[int]], costs: Sequence[float] | dict[int, float], num_ranks: int
) -> tuple[tuple[Bin, ...], ...]:
    """Sort groups of samples into columns of like cost, and give each rank one of every column.

    Bins next to each other in the order of their costs are the best columns: exchanging two bins of different columns
    could only raise the larger of a column. Every second column is dealt in reverse, so that no rank always has the
    largest.
    """
    ordered = sorted(groups, key=lambda group: (-sum(costs[index] for index in group), min(group)))
    bins: list[list[Bin]] = [[] for _ in range(num_ranks)]
    for column, first in enumerate(range(0, len(ordered), num_ranks)):
        members = ordered[first : first + num_ranks]
        for rank, group in enumerate(reversed(members) if column % 2 else members):
            bins[rank].append(tuple(sorted(group)))
    return tuple(tuple(rank) for rank in bins)


def _tokens(lengths: Sequence[int], indices: Bin, is_padded: bool) -> int:
    of_samples = [lengths[index] for index in indices]
    return len(of_samples) * max(of_samples) if is_padded else sum(of_samples)
