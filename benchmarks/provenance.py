"""Which committed results can be traced to a commit, and the marks that stand where the others are quoted.

``marked_results.json`` lists the results that can't, and why. A test compares it with the history; no measurement of
today may be added to it.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

COMMIT_LOST = "commit lost"
"""The file names a commit that is not in the history."""
UNCOMMITTED_CHANGES = "uncommitted changes"
"""Tracked files differed from the commit that the file names."""
NO_COMMIT = "no commit"
"""The file names none."""
MARKED = Path(__file__).parent / "marked_results.json"
DISTURBED = " DISTURBED"
_IN_ORDER = [f" ({mark})" for mark in (COMMIT_LOST, UNCOMMITTED_CHANGES, NO_COMMIT)] + [DISTURBED]


@cache
def marked() -> dict[str, dict[str, str]]:
    """By the name of a result file without suffix, its ``mark`` and the ``reason``."""
    found: dict[str, dict[str, str]] = json.loads(MARKED.read_text())
    return found


def due_mark(result: Mapping[str, Any], history: Collection[str]) -> str | None:
    """The mark that a result must have; None where it can be traced.

    Args:
        history: the commits in front of the one that is checked out, and that one.
    """
    commit = result.get("commit")
    if commit is None:
        return NO_COMMIT
    if not any(known.startswith(commit) for known in history):
        return COMMIT_LOST
    return UNCOMMITTED_CHANGES if result.get("is_dirty", True) else None


def mark(path: Path, is_disturbed: bool = False) -> str:
    """What stands behind a link to a result, for instance `` (commit lost) DISTURBED``; nothing if all is well.

    Args:
        path: of the result's JSON file.
        is_disturbed: something else used the processor. A machine whose speed changed during the run counts as well.
    """
    entry = marked().get(path.stem)
    found = f" ({entry['mark']})" if entry else ""
    return found + (DISTURBED if is_disturbed or _changed_speed(path) else "")


@cache
def _changed_speed(path: Path) -> bool:
    speed = json.loads(path.read_text()).get("machine_speed")
    return speed is not None and speed["is_disturbed"]


def together(marks: Iterable[str]) -> str:
    """The marks of a figure that comes from several results."""
    found = [*marks]
    return "".join(one for one in _IN_ORDER if any(one in marks for marks in found))


def link(text: str, path: Path, folder: str) -> str:
    """A link to a result, and its marks.

    Args:
        path: of the result's JSON file.
        folder: of the results, as the document sees it.
    """
    return f"[{text}]({folder}/{path.name}){mark(path)}"


def source(path: Path, folder: str = "results") -> str:
    """A sentence that names the result of the table above it.

    Args:
        folder: of the results, as the document sees it.
    """
    return f"Samples: {link(path.name, path, folder)}."
