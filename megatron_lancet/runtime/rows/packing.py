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
        if len(tensors) == 1:
            return _SINGLE
        return _layout(tuple([t.shape[1:] for t in tensors]), tuple([t.dtype for t in tensors]))

    @cached_property
    def num_bytes(self) -> tuple[int, ...]:
        """Bytes of a row of each tensor, without padding."""
        rows = zip(self.row_shapes, self.dtypes, strict=True)
        return tuple(shape.numel() * dtype.itemsize for shape, dtype in rows)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """Bytes of a packed row: of each tensor, and of the padding that follows it."""
        return tuple(size for num_bytes in self.num_bytes for size in (num_bytes, _aligned(num_bytes) - num_bytes))

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Packs tensors [N, ...] into one contiguous message [N, ...]; a single tensor is the message itself."""
        if len(tensors) == 1:
            return tensors[0].contiguous()
        packed = tensors[0].new_empty((tensors[0].size(0), sum(self._sizes)), dtype=torch.uint8)
        for part, num_bytes, tensor in zip(self._parts(packed), self.num_bytes, tensors, strict=True):
            rows = tensor.reshape(-1, num_bytes // tensor.element_size())
            if _has_vectors(rows, num_bytes):
                part.view(_SIXTEEN_BYTES).copy_(rows.view(_SIXTEEN_BYTES))
            else:
                part.view(rows.dtype).copy_(rows)
        return packed

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the tensors [N, ...] of a message: views of it."""
        if self is _SINGLE:
            return (packed,)
        num_rows = packed.size(0)
        parts = zip(self._parts(packed), self.dtypes, self.row_shapes, strict=True)
        return tuple(part.view(dtype).view(num_rows, *shape) for part, dtype, shape in parts)

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns views [N, bytes of a row] of each tensor's part of a message."""
        return packed.split_with_sizes(self._sizes, 1)[::2]


_SINGLE = RowLayout((), ())
"""The layout of a single tensor, which is the message itself."""


@cache
def _layout(row_shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]) -> RowLayout:
    """One object for each layout: every message of every step would work the same sizes out again."""
    return RowLayout(row_shapes, dtypes)


def _has_vectors(rows_Nh: torch.Tensor, num_bytes: int) -> bool:
    """Whether rows can be copied into a message in elements of 16 bytes: a GPU then copies them twice as fast.

    Args:
        num_bytes: bytes of a row.
    """
    if num_bytes % _ALIGNMENT_BYTES or rows_Nh.stride(1) != 1 or rows_Nh.data_ptr() % _ALIGNMENT_BYTES:
        return False
    return rows_Nh.stride(0) * rows_Nh.element_size() % _ALIGNMENT_BYTES == 0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
