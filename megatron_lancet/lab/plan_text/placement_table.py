"""Formats placements of experts as text: how even ranks are before and after."""

from collections.abc import Mapping, Sequence

from megatron_lancet.planning.load.expert_load import ExpertLoad
from megatron_lancet.planning.load.placement import contiguous, rows_between_nodes, rows_of_ranks
from megatron_lancet.planning.load.popularity import most_over_mean
from megatron_lancet.report.tables import right_aligned


def as_text(
    load: ExpertLoad, placements: Mapping[int, Sequence[int]], ep_size: int, ranks_per_node: int | None = None
) -> str:
    """A line for each layer: most loaded rank over mean, before and after, and the rows between nodes.

    Args:
        placements: the expert of each slot, by layer.
        ranks_per_node: None to leave rows between nodes out.
    """
    header = ["layer", "most/mean before", "after", "experts moved"]
    table = [header if ranks_per_node is None else [*header, "% of rows between nodes before", "after"]]
    before = contiguous(load.num_experts)
    for layer in load.layers:
        placement = tuple(placements[layer.layer])
        ratios = [most_over_mean(rows_of_ranks(layer.rows_per_expert, one, ep_size)) for one in (before, placement)]
        cells = [str(layer.layer), *(f"{ratio:.2f}" for ratio in ratios), str(_num_moved(placement, before, ep_size))]
        if ranks_per_node is not None:
            total = max(1, sum(layer.rows_per_expert))
            crossing = [rows_between_nodes(layer, one, ep_size, ranks_per_node) for one in (before, placement)]
            cells += [f"{100 * rows / total:.1f}" for rows in crossing]
        table.append(cells)
    return "\n".join(right_aligned(table))


def _num_moved(placement: Sequence[int], before: Sequence[int], ep_size: int) -> int:
    """Slots whose expert was on another rank before."""
    ranks = [slot * ep_size // len(before) for slot in range(len(before))]
    home = dict(zip(before, ranks, strict=True))
    return sum(home[expert] != rank for expert, rank in zip(placement, ranks, strict=True))
