"""Moves rows from the order of their sources to the order of the experts and back, by one kernel in each direction.

Megatron splits the rows into a part for each source and expert and concatenates the parts: a few views for each of
them, which cost the host more than the copy takes on a GPU. Here the index of every row is computed on the rows' device
from the counts that arrived there. Values are moved and not computed, so the bits are the same.

Legend of shapes: S sources, e local experts, m rows of the local experts.
"""

from collections.abc import Callable
from functools import partial

import torch

from megatron_lancet.runtime.rows.sums import Gathered


def by_expert(values_Se: torch.Tensor, last_expert_first: bool) -> torch.Tensor:
    """Values of each source and expert, [S, e], by expert and there by source: [e, S]."""
    values_eS = values_Se.t()
    return values_eS.flip(0) if last_expert_first else values_eS


class RowOrder:
    """A permutation of m rows, and its inverse."""

    def __init__(self, index_m: torch.Tensor, inverse_m: torch.Tensor) -> None:
        """
        Args:
            index_m: the present place of each row of the new order; every place occurs once.
            inverse_m: the new place of each row of the present order.
        """
        self.index_m, self._inverse_m = index_m, inverse_m

    @staticmethod
    def by_expert(rows_by_source_Se: torch.Tensor, num_rows: int, last_expert_first: bool = False) -> "RowOrder":
        """Order rows that are grouped by source, and there by expert, by expert, and there by source.

        Args:
            rows_by_source_Se: number of rows, on the device of the rows, which is not waited for.
            num_rows: their sum, m.
            last_expert_first: order the experts from the last to the first.
        """
        return RowOrder.of_parts(rows_by_source_Se, partial(by_expert, last_expert_first=last_expert_first), num_rows)

    @staticmethod
    def of_parts(sizes: torch.Tensor, reordered: Callable[[torch.Tensor], torch.Tensor], num_rows: int) -> "RowOrder":
        """Order the parts of rows anew.

        Args:
            sizes: number of rows of each part, in their present order, on the device of the rows.
            reordered: maps values of the parts to the new order.
            num_rows: their sum, m.
        """
        new_sizes = reordered(sizes).contiguous()
        ends = sizes.reshape(-1).cumsum(0).view(sizes.shape)
        # Distance of each part between the two orders: in both, a part begins where the parts before it end.
        shifts = new_sizes.view(-1).cumsum(0).view(new_sizes.shape).sub_(reordered(ends))
        shifts_m = torch.repeat_interleave(shifts.view(-1), new_sizes.view(-1), output_size=num_rows)
        places_m = torch.arange(num_rows, device=shifts_m.device)
        index_m = places_m - shifts_m
        return RowOrder(index_m, torch.empty_like(index_m).scatter_(0, index_m, places_m))

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows [m, ...] in the new order."""
        return Gathered.apply(rows, self.index_m, lambda grad: grad.index_select(0, self._inverse_m))

    def undo(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows [m, ...] of the new order in the old one."""
        return Gathered.apply(rows, self._inverse_m, lambda grad: grad.index_select(0, self.index_m))
