"""Documents dealt to the micro-batches of a step, over all ranks: a bin is what one rank computes in one micro-batch.

With expert parallelism all ranks of a group wait for each other in every micro-batch, so the bins that run at the same
time, a column, should take equal time, and every rank must have the same number of bins.

Samples are numbered rank after rank in the order drawn: of ``drawn`` = [[5, 7], [3]], sample 2 has 3 tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_lancet.planning.documents.cost import DocumentCost
from megatron_lancet.planning.documents.largest_first import largest_first

Bin = tuple[int, ...]
"""Indices of samples, ascending."""


@dataclass(frozen=True)
class Dealing:
    """The samples of each rank and micro-batch.

    Attributes:
        bins: per rank and micro-batch, the samples. Every sample is in one bin, and no bin is empty.
        max_tokens: bound on the tokens of a bin: the caller's, or a higher one where the samples do not fit that one.
    """

    bins: tuple[tuple[Bin, ...], ...]
    max_tokens: int


@dataclass(frozen=True)
class Prediction:
    """The cost of a dealing, in the units of :class:`DocumentCost`.

    Attributes:
        bin_costs: per rank and micro-batch.
        step: cost of the step, where all ranks wait for the last one in every micro-batch.
        spread: by how much the quickest rank's bin is below the slowest rank's, over the latter; the mean over
            micro-batches, weighted by their times. 0 where no rank waits.
        waiting: mean share of the step in which a rank waits for others.
        num_tokens: tokens of the samples.
    """

    bin_costs: tuple[tuple[float, ...], ...]
    step: float
    spread: float
    waiting: float
    num_tokens: int


def balanced(drawn: Sequence[Sequence[int]], num_bins: int, cost: DocumentCost, max_tokens: int) -> Dealing:
    """Deal the samples of all ranks so that the bins of a column take nearly the same time on all of them.

    The sum over columns of the slowest bin is kept small, and the largest bin of all as well: the two terms of a step's
    time, also in a pipeline.

    Args:
        drawn: per rank, tokens of its samples in the order drawn.
        num_bins: micro-batches of the step, on every rank.
        cost: of a document.
        max_tokens: bound on the tokens of a bin. It is raised to the least bound that was found where the samples do
            not fit.

    Raises:
        ValueError: there are fewer samples than bins.
    """
    lengths = lengths_of(drawn, num_bins)
    costs = [cost.of(length) for length in lengths]
    groups, bound = largest_first(lengths, costs, len(drawn), num_bins, max_tokens)
    return Dealing(in_columns(groups, costs, len(drawn)), bound)


def bin_tokens(drawn: Sequence[Sequence[int]], dealing: Dealing) -> tuple[tuple[int, ...], ...]:
    """Tokens per rank and micro-batch."""
    lengths = list(chain.from_iterable(drawn))
    return tuple(tuple(sum(lengths[index] for index in indices) for indices in rank) for rank in dealing.bins)


def predicted(drawn: Sequence[Sequence[int]], dealing: Dealing, cost: DocumentCost, num_stages: int = 1) -> Prediction:
    """The cost of a dealing if all ranks wait for the last one in every micro-batch.

    Args:
        drawn: the samples that were dealt.
        dealing: of these samples.
        cost: of a document.
        num_stages: stages of the pipeline. The step is the sum over micro-batches and ``num_stages - 1`` times the
            longest of them (1F1B).
    """
    lengths = list(chain.from_iterable(drawn))
    bin_costs = tuple(
        tuple(sum(cost.of(lengths[index]) for index in indices) for indices in rank) for rank in dealing.bins
    )
    columns = list(zip(*bin_costs, strict=True))
    slowest = [max(column) for column in columns]
    computed = sum(chain.from_iterable(bin_costs)) / len(drawn)
    step = sum(slowest) + (num_stages - 1) * max(slowest)
    return Prediction(
        bin_costs=bin_costs,
        step=step,
        spread=1 - sum(min(column) for column in columns) / sum(slowest),
        waiting=1 - computed / step,
        num_tokens=sum(lengths),
    )


def lengths_of(drawn: Sequence[Sequence[int]], num_bins: int) -> list[int]:
    """Tokens of the samples of all ranks, of which there must be enough for the bins.

    Raises:
        ValueError: there are fewer samples than bins.
    """
    lengths = list(chain.from_iterable(drawn))
    if len(lengths) < len(drawn) * num_bins:
        raise ValueError(
            f"{num_bins} bins on each of {len(drawn)} ranks need at least {len(drawn) * num_bins} samples, "
            f"and there are {len(lengths)}"
        )
    return lengths


def in_columns(
    groups: Sequence[Sequence[int]], costs: Sequence[float] | Mapping[int, float], num_ranks: int
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
