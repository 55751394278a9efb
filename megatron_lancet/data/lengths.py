"""How long documents are: a histogram in a small JSON file, written next to a dataset or read from its index.

The file is ``{"lengths": {"17": 3, "240": 1}}``: three documents of 17 tokens and one of 240, end-of-document included.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lancet.data.indexed import check_dataset, sequence_lengths
from megatron_lancet.errors import UsageError
from megatron_lancet.files.reader import RecordError, parse_object, read_text

type Histogram = dict[int, int]
"""Number of documents by their tokens, shorter ones first."""


def as_json(histogram: Mapping[int, int]) -> str:
    """The content of a file of lengths."""
    return json.dumps({"lengths": {str(length): histogram[length] for length in sorted(histogram)}}) + "\n"


def read_lengths(source: Path) -> Histogram:
    """The histogram of a file of lengths, or of a dataset that is named without .bin/.idx.

    Raises:
        UsageError: there is neither, or it is damaged, or has no document.
    """
    if source.is_file():
        found = _from_file(source)
    elif Path(f"{source}.idx").is_file():
        found = _from_dataset(str(source))
    else:
        raise UsageError(
            f"no lengths at {source}: expected a JSON file of lancet data encode --write-lengths, or a dataset's "
            "prefix without .bin/.idx"
        )
    if not found:
        raise UsageError(f"{source} has no document with a token")
    return found


def _from_dataset(prefix: str) -> Histogram:
    check_dataset(prefix)
    lengths, counts = np.unique(sequence_lengths(prefix), return_counts=True)
    return {
        int(length): int(count) for length, count in zip(lengths.tolist(), counts.tolist(), strict=True) if length > 0
    }


def _from_file(path: Path) -> Histogram:
    try:
        counts = parse_object(read_text(path), str(path)).get("lengths")
    except RecordError as error:
        raise UsageError(str(error)) from error
    if not isinstance(counts, dict):
        raise UsageError(f'{path}: expected {{"lengths": {{"17": 3}}}}, numbers of documents by their tokens')
    found = {_length(path, text): _count(path, text, count) for text, count in counts.items()}
    return {length: found[length] for length in sorted(found) if found[length] > 0}


def _length(path: Path, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 0 < int(text) < 1 << 31):
        raise UsageError(f"{path}: expected tokens of a document, at least 1, found {text!r}")
    return int(text)


def _count(path: Path, length: str, count: Any) -> int:
    if type(count) is not int or count < 0:
        raise UsageError(f"{path}: expected a number of documents of {length} tokens, found {count!r}")
    return count
