"""Reading JSONL corpora: one JSON object a line, UTF-8, blank lines ignored."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron_lancet.errors import UsageError


@dataclass(frozen=True)
class LineBatch:
    """Consecutive raw lines of a file.

    Attributes:
        first_line_number: 1-based number of ``lines[0]`` in the file.
        lines: raw bytes, line ends included.
    """

    first_line_number: int
    lines: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the lines in the file."""
        return sum(map(len, self.lines))


def open_input(path: Path) -> BinaryIO:
    """Open ``path`` for reading bytes.

    Raises:
        UsageError: it is missing, a folder, or not readable.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read input file {path}: {error.strerror}; check the path of --input") from error


def iter_line_batches(path: Path, max_batch_bytes: int) -> Iterator[LineBatch]:
    """Cut a file into batches of whole lines of about ``max_batch_bytes`` (a longer line is a batch of its own).

    The cuts depend only on the file, so results per batch are the same for any number of workers.
    """
    with open_input(path) as file:
        line_number = 1
        # readlines(hint) stops after the line that exceeds the hint: whole lines, at least one.
        while lines := tuple(file.readlines(max_batch_bytes)):
            yield LineBatch(line_number, lines)
            line_number += len(lines)


def parse_line(line: bytes, keys: Sequence[str], location: str) -> tuple[str, ...] | None:
    """Texts of one JSONL line, in the order of ``keys``; None for a blank line.

    Args:
        keys: keys that the object must have, with string values.
        location: file and line, for error messages.

    Raises:
        UsageError: the line is not UTF-8, not a JSON object, or lacks a key; a value is no string or cannot be written
            as UTF-8 (JSON can spell half of a surrogate pair).
    """
    if not line.strip():
        return None
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} at byte {error.start} of the line"
        raise UsageError(f"{location}: expected UTF-8, found {found}; convert the file to UTF-8") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{location}: expected one JSON object, found invalid JSON ({error})") from error
    if not isinstance(record, dict):
        raise UsageError(f"{location}: expected a JSON object, found {type(record).__name__}")
    for key in keys:
        if key not in record:
            raise UsageError(f"{location}: expected the key {key!r}, found the keys {sorted(record)}")
        text = record[key]
        if not isinstance(text, str):
            raise UsageError(f"{location}: expected a string under {key!r}, found {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{location}: the string under {key!r} has a lone surrogate at character {error.start}, which"
                " no UTF-8 text can hold; repair the program that wrote the file"
            ) from error
    return tuple(record[key] for key in keys)


def iter_texts(path: Path, key: str) -> Iterator[str]:
    """Text under ``key`` of every line of a JSONL file that is not blank; errors as in :func:`parse_line`."""
    with open_input(path) as file:
        for line_number, line in enumerate(file, start=1):
            texts = parse_line(line, (key,), f"{path}, line {line_number}")
            if texts is not None:
                yield texts[0]
