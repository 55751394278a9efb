"""Packs several tensors with equally many rows into one message: their rows side by side.

This saves one message per dispatch in each direction, for one copy of the rows. Legend: N rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT_BYTES = 16
"""Alignment of each tensor's part of a packed row, so that kernels can read it in place with full vectors."""


@dataclass(frozen=True)
class RowLayout:
    """Layout of packed rows: the shape of a row, and the type, of each tensor."""

    row_shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> "RowLayout":
        """Returns the layout for tensors [N, ...]."""
        return RowLayout(tuple(t.shape[1:] for t in tensors), tuple(t.dtype for t in tensors))

    @property
    def num_bytes(self) -> tuple[int, ...]:
        """Bytes of a row of each tensor, without padding."""
        return tuple(s.numel() * d.itemsize for s, d in zip(self.row_shapes, self.dtypes, strict=True))

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Packs tensors [N, ...] into one contiguous message [N, ...]; a single tensor is the message itself."""
        if len(tensors) == 1:
            return tensors[0].contiguous()
        row_bytes = sum(map(_aligned, self.num_bytes))
        packed = tensors[0].new_empty((len(tensors[0]), row_bytes), dtype=torch.uint8)
        for part, tensor in zip(self._columns(packed), tensors, strict=True):
            part.copy_(tensor.reshape(part.shape))
        return packed

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the tensors [N, ...] of a message, as views of it."""
        if len(self.dtypes) == 1:
            return (packed,)
        return tuple(
            part.view(len(part), *shape) for part, shape in zip(self._columns(packed), self.row_shapes, strict=True)
        )

    def _columns(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Returns views [N, elements of a row] of each tensor's part of a message."""
        columns, start = [], 0
        for num_bytes, dtype in zip(self.num_bytes, self.dtypes, strict=True):
            columns.append(packed[:, start : start + num_bytes].view(dtype))
            start += _aligned(num_bytes)
        return columns


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
