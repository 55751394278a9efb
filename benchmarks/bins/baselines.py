"""Ways to put documents into micro-batches with which balanced bins are compared."""

from collections.abc import Sequence

from benchmarks.bins.padded_groups import padded_groups
from megatron_lancet.planning.documents.bins import Dealing, in_columns, lengths_of
from megatron_lancet.planning.documents.cost import DocumentCost


def one_a_row(drawn: Sequence[Sequence[int]]) -> Dealing:
    """Each document a micro-batch of its own."""
    rows, first = [], 0
    for lengths in drawn:
        rows.append(tuple((first + index,) for index in range(len(lengths))))
        first += len(lengths)
    return Dealing(tuple(rows), max(max(lengths) for lengths in drawn))


def first_fit(drawn: Sequence[Sequence[int]], num_bins: int, max_tokens: int) -> Dealing:
    """Pack each rank's own samples in the order drawn, each into the first bin that has room for it.

    A sample for which no bin has room goes to the bin with the fewest tokens, which then exceeds the bound. The last
    samples go to empty bins if there are no more samples than empty bins.

    Args:
        drawn: per rank, tokens of its samples in the order drawn.
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


def padded(drawn: Sequence[Sequence[int]], num_bins: int, cost: DocumentCost, max_tokens: int) -> Dealing:
    """Deal samples of like length to bins whose samples are padded to the longest, for attention without packing.

    This is the dynamic program of DynaPipe (EuroSys 2024, section 4) over samples sorted by length, with a fixed number
    of micro-batches: with expert parallelism all ranks must have as many.

    Args:
        drawn: per rank, tokens of its samples in the order drawn.
        num_bins: micro-batches of the step, on every rank.
        cost: of a document.
        max_tokens: bound on the tokens of a bin with its padding. It is raised to the least that fits.

    Raises:
        ValueError: there are fewer samples than bins.
    """
    lengths = lengths_of(drawn, num_bins)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    descending = [lengths[index] for index in order]
    candidates: list[tuple[float, Dealing]] = []
    costs_of_samples = [cost.of(length) for length in descending]
    groups_of_bounds, bound = padded_groups(descending, costs_of_samples, len(drawn), num_bins, max_tokens)
    for places in groups_of_bounds:
        groups = [[order[place] for place in group] for group in places]
        # Every sample of a padded group costs as much as the first sample, the longest of the group.
        by_sample = {index: cost.of(lengths[group[0]]) for group in groups for index in group}
        dealing = Dealing(in_columns(groups, by_sample, len(drawn)), bound)
        columns = zip(*dealing.bins, strict=True)
        step = sum(max(sum(by_sample[index] for index in indices) for indices in column) for column in columns)
        candidates.append((step, dealing))
    return min(candidates, key=lambda candidate: candidate[0])[1]


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
