"""Megatron's ``.bin``/``.idx`` datasets, checked before Megatron maps them into memory.

Megatron trusts an index: a damaged one makes it read beyond its files, run out of memory or crash the process.
Layout of an ``.idx`` of S sequences and D document bounds: header, version (8 bytes), dtype code (1 byte), S and D (8
bytes each), lengths [S] int32, offsets in bytes [S] int64, document bounds [D] int64; multimodal data adds modes [S]
int8.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lancet.errors import UsageError

_HEADER = b"MMIDIDX\x00\x00"
_VERSION = 1
_FIXED = struct.Struct("<QBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Megatron's codes for tokens; 6 and 7 are floating point, which no token is."""

_BYTES_PER_SEQUENCE = 4 + 8
_BYTES_PER_BOUND = 8


@dataclass(frozen=True)
class TokenFile:
    """A checked dataset.

    Attributes:
        prefix: path without ``.bin``/``.idx``.
        dtype: type of its tokens.
        in_order: whether the ``.bin`` stores the sequences one after the other, from its start.
    """

    prefix: str
    dtype: np.dtype
    num_sequences: int
    num_tokens: int
    in_order: bool

    def tokens(self) -> np.ndarray:
        """All tokens [num_tokens], mapped from the file.

        Raises:
            UsageError: the sequences are not in order, so that there is no such array.
        """
        if not self.in_order:
            raise UsageError(f"{self.prefix}.idx: the sequences are not in the order of {self.prefix}.bin.")
        if self.num_tokens == 0:
            return np.zeros(0, dtype=self.dtype)
        return np.memmap(f"{self.prefix}.bin", dtype=self.dtype, mode="r", shape=(self.num_tokens,))


def check_dataset(prefix: str) -> TokenFile:
    """Check an index: its sizes, its dtype, and that every sequence lies within the ``.bin``.

    Args:
        prefix: path of the dataset without ``.bin``/``.idx``, as for ``--data-path``.

    Raises:
        UsageError: a file is missing or damaged.
    """
    idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (idx, bin_):
        if not path.is_file():
            raise UsageError(f"no dataset at {prefix}: {path} is missing. Give the prefix without .bin/.idx.")
    try:
        with idx.open("rb") as file:
            head = file.read(len(_HEADER) + _FIXED.size)
        idx_bytes, bin_bytes = idx.stat().st_size, bin_.stat().st_size
    except OSError as error:
        raise UsageError(f"{idx} can't be read: {error.strerror or error}") from error
    dtype, num_sequences, num_bounds = _read_head(head, idx)
    expected = len(head) + num_sequences * _BYTES_PER_SEQUENCE + num_bounds * _BYTES_PER_BOUND
    if idx_bytes not in (expected, expected + num_sequences):
        raise _damaged(
            idx, f"for {num_sequences} sequences and {num_bounds} bounds it must have {expected} bytes, not {idx_bytes}"
        )
    lengths, offsets, bounds = _arrays(idx, len(head), num_sequences, num_bounds)
    if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != num_sequences or bool((bounds[1:] < bounds[:-1]).any()):
        raise _damaged(idx, f"the bounds of its documents must rise from 0 to {num_sequences}")
    in_order = _check_sequences(idx, lengths, offsets, dtype.itemsize, bin_bytes)
    return TokenFile(prefix, dtype, num_sequences, int(lengths.sum(dtype=np.int64)), in_order)


def _damaged(idx: Path, why: str) -> UsageError:
    return UsageError(f"{idx} is damaged, or no index of tokens: {why}. Rebuild it with lancet data encode.")


def _read_head(head: bytes, idx: Path) -> tuple[np.dtype, int, int]:
    if len(head) < len(_HEADER) + _FIXED.size or not head.startswith(_HEADER):
        raise _damaged(idx, f"it must start with {_HEADER!r} and {_FIXED.size} more bytes")
    version, code, num_sequences, num_bounds = _FIXED.unpack(head[len(_HEADER) :])
    if version != _VERSION:
        raise _damaged(idx, f"expected version {_VERSION}, found {version}")
    if code not in _DTYPES:
        raise _damaged(idx, f"expected a dtype code of {', '.join(map(str, _DTYPES))}, found {code}")
    return np.dtype(_DTYPES[code]), num_sequences, num_bounds


def _arrays(idx: Path, start: int, num_sequences: int, num_bounds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    data = np.memmap(idx, dtype=np.uint8, mode="r")
    after_lengths = start + 4 * num_sequences
    after_offsets = after_lengths + 8 * num_sequences
    lengths = data[start:after_lengths].view(np.dtype("<i4"))
    offsets = data[after_lengths:after_offsets].view(np.dtype("<i8"))
    bounds = data[after_offsets : after_offsets + 8 * num_bounds].view(np.dtype("<i8"))
    return lengths, offsets, bounds


def _check_sequences(idx: Path, lengths: np.ndarray, offsets: np.ndarray, token_bytes: int, bin_bytes: int) -> bool:
    """Checks that every sequence lies in the ``.bin``; returns whether they lie one after the other."""
    if len(lengths) == 0:
        return True
    if int(lengths.min()) < 0:
        raise _damaged(idx, "a sequence has a negative length")
    if int(offsets.min()) < 0 or int(offsets.max()) > bin_bytes:
        raise _damaged(idx, f"a sequence starts outside the {bin_bytes} bytes of the .bin")
    num_bytes = lengths.astype(np.int64) * token_bytes
    ends = offsets + num_bytes  # no overflow: lengths below 2^31, offsets within a file
    if int(ends.max()) > bin_bytes:
        raise _damaged(idx, f"a sequence ends at byte {int(ends.max())} of a .bin of {bin_bytes}, which may be cut")
    return int(offsets[0]) == 0 and bool((offsets[1:] == ends[:-1]).all())
