"""Packs several tensors with equally many rows into one message: their rows side by side.

This saves one message per dispatch in each direction, for one copy of the rows. The first tensor, which holds hidden
states, may be narrowed on the way: its rows are made of fewer bytes when they are packed, and get their type back when
they are unpacked. Legend: N rows, h elements of a row, G groups of a row that have a scale each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from megatron_lancet.schedule.comm_dtype import FP8_GROUP, RowFormat

_ALIGNMENT_BYTES = 16
"""Alignment of each tensor's part of a packed row, so that kernels can read it in place with full vectors."""
_SIXTEEN_BYTES = torch.complex128
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_WIDTH_BYTES = {RowFormat.BF16: torch.bfloat16.itemsize, RowFormat.FP8: _FP8.itemsize}
_SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal
"""Scale of a group of zeros, and of values that are too small to have one of their own."""


@dataclass(frozen=True)
class RowLayout:
    """Layout of packed rows: the shape of a row, and the type, of each tensor.

    Attributes:
        row_format: format of the first tensor in a message; never wider than the tensor's type.
    """

    row_shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    row_format: RowFormat = RowFormat.EXACT

    @staticmethod
    def of(tensors: Sequence[torch.Tensor], row_format: RowFormat = RowFormat.EXACT) -> "RowLayout":
        """Returns the layout for tensors [N, ...].

        Args:
            row_format: format of the first tensor in a message, if the format is narrower than the tensor's type.
        """
        width_bytes = _WIDTH_BYTES.get(row_format)
        is_narrower = width_bytes is not None and width_bytes < tensors[0].dtype.itemsize
        return _layout(
            tuple(t.shape[1:] for t in tensors),
            tuple(t.dtype for t in tensors),
            row_format if is_narrower else RowFormat.EXACT,
        )

    @cached_property
    def num_bytes(self) -> tuple[int, ...]:
        """Bytes of a row of each part, without padding; fp8 rows are two parts, values and scales."""
        return tuple(num_elements * dtype.itemsize for num_elements, dtype in self._parts)

    @cached_property
    def _row_bytes(self) -> int:
        """Bytes of a packed row, with padding."""
        return sum(map(_aligned, self.num_bytes))

    @cached_property
    def _parts(self) -> list[tuple[int, torch.dtype]]:
        """Elements of a row, and type on the wire, of each part of a packed row."""
        (first, *others) = zip((shape.numel() for shape in self.row_shapes), self.dtypes, strict=True)
        match self.row_format:
            case RowFormat.EXACT:
                return [first, *others]
            case RowFormat.BF16:
                return [(first[0], torch.bfloat16), *others]
            case RowFormat.FP8:
                return [(first[0], _FP8), (_num_groups(first[0]), torch.float32), *others]

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Packs tensors [N, ...] into one contiguous message [N, ...].

        A single tensor is the message itself, unless it is narrowed.
        """
        values = self._narrowed(tensors)
        if len(values) == 1:
            return values[0].contiguous()
        packed = tensors[0].new_empty((tensors[0].size(0), self._row_bytes), dtype=torch.uint8)
        for part, tensor in zip(self._columns(packed), values, strict=True):
            target, source = _in_vectors(part), _in_vectors(tensor.reshape(part.shape))
            if target.dtype is not source.dtype:
                target, source = part, tensor.reshape(part.shape)
            target.copy_(source)
        return packed

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the tensors [N, ...] of a message: views of it, unless it was narrowed."""
        columns = self._columns(packed) if len(self._parts) > 1 else [packed]
        if self.row_format is not RowFormat.EXACT:
            # The others are copied, so that what is kept of them does not keep the narrow rows next to the wide ones.
            columns = [
                self._widened(columns),
                *(column.clone() for column in columns[1 + len(columns) - len(self.dtypes) :]),
            ]
        num_rows = packed.size(0)
        return tuple(column.view(num_rows, *shape) for column, shape in zip(columns, self.row_shapes, strict=True))

    def _columns(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Returns views [N, elements of a row] of each part of a message."""
        columns, start = [], 0
        for num_bytes, (_, dtype) in zip(self.num_bytes, self._parts, strict=True):
            columns.append(packed[:, start : start + num_bytes].view(dtype))
            start += _aligned(num_bytes)
        return columns

    def _narrowed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of the message of tensors [N, ...]."""
        match self.row_format:
            case RowFormat.EXACT:
                return list(tensors)
            case RowFormat.BF16:
                return [tensors[0].to(torch.bfloat16), *tensors[1:]]
            case RowFormat.FP8:
                return [*to_fp8(tensors[0].flatten(1)), *tensors[1:]]

    def _widened(self, columns: list[torch.Tensor]) -> torch.Tensor:
        """The first tensor, from the parts of a message."""
        if self.row_format is RowFormat.FP8:
            return from_fp8(columns[0], columns[1], self.dtypes[0])
        return columns[0].to(self.dtypes[0])


@cache
def _layout(row_shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...], row_format: RowFormat) -> RowLayout:
    """One object for each layout: every message of every step would work the same sizes out again."""
    return RowLayout(row_shapes, dtypes, row_format)


def to_fp8(rows_Nh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds rows to e4m3, so that the largest value of each group becomes the largest number of e4m3.

    A value x of a group with the largest absolute value m gets an error of at most max(|x| / 16, m / 2^18.8). A group
    with a value that is infinite or NaN is all NaN afterwards.

    Returns:
        Values [N, h] in e4m3, and the fp32 scales [N, G] that give them back their size.
    """
    groups = _in_groups(rows_Nh.float())
    scales_NG = (groups.abs().amax(dim=2) / _FP8_MAX).clamp_min(_SMALLEST_SCALE)
    # A quotient that is rounded up to a little more than the largest number is rounded down to it.
    values = (groups / scales_NG.unsqueeze(2)).to(_FP8)
    return values.flatten(1)[:, : rows_Nh.size(1)], scales_NG


def from_fp8(values_Nh: torch.Tensor, scales_NG: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undoes :func:`to_fp8` but for the rounding; rows [N, h] of a type."""
    groups = _in_groups(values_Nh.float()).mul_(scales_NG.unsqueeze(2))
    return groups.flatten(1)[:, : values_Nh.size(1)].to(dtype).contiguous()


def _in_groups(rows_Nh: torch.Tensor) -> torch.Tensor:
    """Rows with zeros behind them up to a whole group, [N, G, elements of a group]; a view where none are missing."""
    num_rows, num_elements = rows_Nh.shape
    num_groups = _num_groups(num_elements)
    if num_elements % FP8_GROUP:
        rows_Nh = torch.nn.functional.pad(rows_Nh, (0, num_groups * FP8_GROUP - num_elements))
    return rows_Nh.reshape(num_rows, num_groups, FP8_GROUP)


def _num_groups(num_elements: int) -> int:
    return -(-num_elements // FP8_GROUP)


def _in_vectors(rows_Nh: torch.Tensor) -> torch.Tensor:
    """The rows in elements of 16 bytes, if their addresses permit: a GPU then copies them to a column twice as fast."""
    num_bytes = rows_Nh.element_size()
    places = rows_Nh.size(1) * num_bytes, rows_Nh.stride(0) * num_bytes, rows_Nh.data_ptr()
    if rows_Nh.stride(1) != 1 or any(place % _ALIGNMENT_BYTES for place in places):
        return rows_Nh
    return rows_Nh.view(_SIXTEEN_BYTES)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
