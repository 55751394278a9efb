"""Errors in kernel order that deletions do not cover: a wrong stream, or a statement too early or too late."""

import ast
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

_NCCL, _STORE = "runtime/transport/nccl.py", "runtime/weight_grad_store.py"


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


_LAUNCH, _COUNTS = (_NCCL, "StreamTransport.launch"), (_NCCL, "_StreamCounts.__init__")

REPLACED: dict[Place, tuple[str, str]] = {
    Place(*_LAUNCH, "self._stream.wait_stream(torch.cuda.current_stream())"): (
        "the wrong way round",
        "torch.cuda.current_stream().wait_stream(self._stream)",
    ),
    Place(*_LAUNCH, "with torch.cuda.stream(self._stream):"): (
        "on the stream of counts",
        "with torch.cuda.stream(self._counts_stream): pass",
    ),
    Place(_NCCL, "StreamTransport.empty_receive", "received.record_stream(torch.cuda.current_stream())"): (
        "for the wrong stream",
        "received.record_stream(self._stream)",
    ),
    Place(_STORE, "_report_all", "ddp_stream.wait_stream(dw_stream)"): (
        "the wrong way round",
        "dw_stream.wait_stream(ddp_stream)",
    ),
}
"""The fault and the statement that replaces the place; a context keeps its body."""
SWAPPED: dict[Place, tuple[str, int]] = {
    Place(*_LAUNCH, "times.end.record()"): ("recorded before the message", -1),
    Place(*_COUNTS, "self._times.end.record()"): ("recorded before the copy", -1),
    Place(*_COUNTS, "ready.block(stream)"): ("behind the exchange", 1),
    Place(_NCCL, "_StreamCounts.wait", "self._times.end.synchronize()"): ("behind the read", 1),
    Place(_NCCL, "_StreamCounts.wait_for_own", "self._times.start.synchronize()"): ("behind the read", 1),
}
"""The fault if the place is swapped with a neighbour, and the neighbour's offset."""


def misplaced(
    file: str, function: str, line: str, block: list[ast.stmt], index: int
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the mutants of a statement in these lists: the fault, and a function that changes the block."""
    for place, (change, instead) in REPLACED.items():
        if is_at(place, file, function, line):
            yield change, partial(_replace, block, index, instead)
    for place, (change, by) in SWAPPED.items():
        if is_at(place, file, function, line):
            yield change, partial(_swap, block, index, index + by)


def is_at(place: Place, file: str, function: str, line: str) -> bool:
    return (file, function) == place[:2] and line.startswith(place.line)


def _replace(block: list[ast.stmt], index: int, instead: str) -> None:
    old = block[index]
    (new,) = ast.parse(instead).body
    if isinstance(old, ast.With) and isinstance(new, ast.With):
        new.body = old.body
    block[index] = new


def _swap(block: list[ast.stmt], one: int, other: int) -> None:
    block[one], block[other] = block[other], block[one]
