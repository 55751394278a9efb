"""Errors in the order of kernels or messages that name what else is in reach: another stream, another group."""

import ast
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

_NCCL = "runtime/transport/nccl.py"


class Place(NamedTuple):
    """A statement of the product.

    Attributes:
        file: path in the package.
        function: qualified name of the outermost function.
        line: prefix of the statement's first line.
    """

    file: str
    function: str
    line: str


_LAUNCH = _NCCL, "StreamTransport.launch"

REPLACED: dict[Place, tuple[str, str]] = {
    Place(*_LAUNCH, "dist.all_to_all_single("): (
        "in the group of counts",
        "dist.all_to_all_single(received, sent, list(receive_rows), list(send_rows), group=self._counts_group)",
    ),
    Place(*_LAUNCH, "with torch.cuda.stream(self._stream):"): (
        "on the stream of counts",
        "with torch.cuda.stream(self._counts_stream): pass",
    ),
    Place(_NCCL, "StreamTransport.empty_receive", "received.record_stream(torch.cuda.current_stream())"): (
        "for the wrong stream",
        "received.record_stream(self._stream)",
    ),
}
"""The fault and the statement that replaces the place; a context keeps its body."""


def misplaced(
    file: str, function: str, line: str, block: list[ast.stmt], index: int
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the mutants of a statement in these lists: the fault, and a function that changes the block."""
    for place, (change, instead) in REPLACED.items():
        if is_at(place, file, function, line):
            yield change, partial(_replace, block, index, instead)


def is_at(place: Place, file: str, function: str, line: str) -> bool:
    return (file, function) == place[:2] and line.startswith(place.line)


def _replace(block: list[ast.stmt], index: int, instead: str) -> None:
    old = block[index]
    (new,) = ast.parse(instead).body
    if isinstance(old, ast.With) and isinstance(new, ast.With):
        new.body = old.body
    block[index] = new
