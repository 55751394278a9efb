"""Marks where documents quote a committed result that cannot be traced to a commit.

``marked_results.json`` lists these results and the reasons. A test compares it with the history; new measurements may
not be added to it.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

COMMIT_LOST = "commit lost"
"""The file's commit is not in the history."""
UNCOMMITTED_CHANGES = "uncommitted changes"
"""Tracked files differed from the file's commit."""
NO_COMMIT = "no commit"
"""The file has no commit."""
MARKED = Path(__file__).parent / "marked_results.json"
DISTURBED = " DISTURBED"
_IN_ORDER = [f" ({mark})" for mark in (COMMIT_LOST, UNCOMMITTED_CHANGES, NO_COMMIT)] + [DISTURBED]


@cache
def marked() -> dict[str, dict[str, str]]:
    """Returns the ``mark`` and the ``reason`` of each listed result, by file name without suffix."""
    found: dict[str, dict[str, str]] = json.loads(MARKED.read_text())
    return found


def due_mark(result: Mapping[str, Any], history: Collection[str]) -> str | None:
    """Returns the mark that a result must have; None if it can be traced.

    Args:
        history: the checked-out commit and its ancestors.
    """
    commit = result.get("commit")
    if commit is None:
        return NO_COMMIT
    if not any(known.startswith(commit) for known in history):
        return COMMIT_LOST
    return UNCOMMITTED_CHANGES if result.get("is_dirty", True) else None


def mark(path: Path, is_disturbed: bool = False) -> str:
    """Returns the text after a link to a result, for instance `` (commit lost) DISTURBED``; empty without a mark.

    Args:
        path: the result's JSON file.
        is_disturbed: other work took the processor or memory. A changed machine speed is detected from the file.
    """
    entry = marked().get(path.stem)
    found = f" ({entry['mark']})" if entry else ""
    return found + (DISTURBED if is_disturbed or _changed_speed(path) else "")


@cache
def _changed_speed(path: Path) -> bool:
    speed = json.loads(path.read_text()).get("machine_speed")
    return speed is not None and speed["is_disturbed"]


def together(marks: Iterable[str]) -> str:
    """Returns the marks of a figure that comes from several results."""
    found = [*marks]
    return "".join(one for one in _IN_ORDER if any(one in marks for marks in found))


def link(text: str, path: Path, folder: str) -> str:
    """Returns a link to a result, and its marks.

    Args:
        path: the result's JSON file.
        folder: path from the document to the results.
    """
    return f"[{text}]({folder}/{path.name}){mark(path)}"


def source(path: Path, folder: str = "results") -> str:
    """Returns a sentence that names the source of the table above it.

    Args:
        folder: path from the document to the results.
    """
    return f"Samples: {link(path.name, path, folder)}."
