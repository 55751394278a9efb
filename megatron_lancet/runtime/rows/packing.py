"""Packs several tensors with equally many rows into one message: their rows side by side.

This saves one message per dispatch in each direction, for one copy of the rows. Legend: N rows, h elements of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

_ALIGNMENT_BYTES = 16
"""Alignment of each tensor's part of a packed row, so that kernels can read it in place with full vectors."""
_SIXTEEN_BYTES = torch.complex128


@dataclass(frozen=True)
class RowLayout:
    """Layout of packed rows: the shape of a row, and the type, of each tensor."""

    row_shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> "RowLayout":
        """Returns the layout for tensors [N, ...]."""
        return _layout(tuple(t.shape[1:] for t in tensors), tuple(t.dtype for t in tensors))

    @cached_property
    def num_bytes(self) -> tuple[int, ...]:
        """Bytes of a row of each tensor, without padding."""
        rows = zip(self.row_shapes, self.dtypes, strict=True)
        return tuple(shape.numel() * dtype.itemsize for shape, dtype in rows)

    @cached_property
    def _row_bytes(self) -> int:
        """Bytes of a packed row, with padding."""
        return sum(map(_aligned, self.num_bytes))

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Packs tensors [N, ...] into one contiguous message [N, ...]; a single tensor is the message itself."""
        if len(tensors) == 1:
            return tensors[0].contiguous()
        packed = tensors[0].new_empty((tensors[0].size(0), self._row_bytes), dtype=torch.uint8)
        for part, tensor in zip(self._columns(packed), tensors, strict=True):
            target, source = _in_vectors(part), _in_vectors(tensor.reshape(part.shape))
            if target.dtype is not source.dtype:
                target, source = part, tensor.reshape(part.shape)
            target.copy_(source)
        return packed

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the tensors [N, ...] of a message: views of it."""
        columns = self._columns(packed) if len(self.dtypes) > 1 else [packed]
        num_rows = packed.size(0)
        return tuple(column.view(num_rows, *shape) for column, shape in zip(columns, self.row_shapes, strict=True))

    def _columns(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Returns views [N, elements of a row] of each tensor's part of a message."""
        columns, start = [], 0
        for num_bytes, dtype in zip(self.num_bytes, self.dtypes, strict=True):
            columns.append(packed[:, start : start + num_bytes].view(dtype))
            start += _aligned(num_bytes)
        return columns


@cache
def _layout(row_shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]) -> RowLayout:
    """One object for each layout: every message of every step would work the same sizes out again."""
    return RowLayout(row_shapes, dtypes)


def _in_vectors(rows_Nh: torch.Tensor) -> torch.Tensor:
    """The rows in elements of 16 bytes, if their addresses permit: a GPU then copies them to a column twice as fast."""
    num_bytes = rows_Nh.element_size()
    places = rows_Nh.size(1) * num_bytes, rows_Nh.stride(0) * num_bytes, rows_Nh.data_ptr()
    if rows_Nh.stride(1) != 1 or any(place % _ALIGNMENT_BYTES for place in places):
        return rows_Nh
    return rows_Nh.view(_SIXTEEN_BYTES)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
