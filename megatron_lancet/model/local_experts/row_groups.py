"""How the rows of a chunk are divided among the local experts, for grouped GEMMs.

Legend of shapes: m rows of all local experts, e local experts, j neighbouring experts.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from megatron_lancet.runtime.device import on_cuda


class RowGroup(NamedTuple):
    """The rows of j neighbouring experts.

    Attributes:
        rows: their place among all rows.
        ends: [j] int32 on the device, the end of each expert's rows, counted from the group's first.
    """

    rows: slice
    ends: torch.Tensor


class RowGroups:
    """Rows [m, ...] of the local experts, the last expert's first; nothing waits for the device to divide them."""

    def __init__(self, rows_per_expert: torch.Tensor, rows: torch.Tensor) -> None:
        """
        Args:
            rows_per_expert: [e] in the experts' order; on the host, or on the device of the rows.
            rows: [m, ...].
        """
        self._rows_per_expert = rows_per_expert
        self._on_cuda, self._device, self._num_rows = on_cuda(rows), rows.device, rows.size(0)
        self._found: dict[tuple[int, ...], list[RowGroup]] = {}

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each expert, the last expert first. The host waits for counts that are on the device."""
        sizes: list[int] = self._rows_per_expert.tolist()[::-1]
        return sizes

    def of(self, lengths: Sequence[int]) -> list[RowGroup]:
        """Returns the rows of groups of neighbouring experts.

        Args:
            lengths: number of experts of each group, e in all; the first group has the last experts.
        """
        key = tuple(lengths)
        if key not in self._found:
            self._found[key] = list(self._groups(key))
        return self._found[key]

    def _groups(self, lengths: tuple[int, ...]) -> Iterator[RowGroup]:
        if len(lengths) == 1 and self._rows_per_expert.device.type != "cpu":
            yield RowGroup(slice(0, self._num_rows), self._rows_per_expert.flip(0).cumsum(0, dtype=torch.int32))
            return
        sizes = iter(self.sizes)
        ends = [list(itertools.accumulate(itertools.islice(sizes, length))) for length in lengths]
        # One copy for all groups; the caching host allocator keeps the pinned memory until it is done.
        on_host = torch.tensor([*itertools.chain(*ends)], dtype=torch.int32, pin_memory=self._on_cuda)
        start = 0
        for own, ends_j in zip(ends, on_host.to(self._device, non_blocking=True).split(lengths), strict=True):
            yield RowGroup(slice(start, start + own[-1]), ends_j)
            start += own[-1]
