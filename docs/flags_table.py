"""Writes the rows of refused flags in flags.md: ``make flags``, or ``python docs/flags_table.py``.

The product has these flags as a table, :mod:`megatron_lancet.training.plan.support`. The other rows are written by
hand, and checked by ``tests/unit/training/test_flags_table.py``.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from megatron_lancet.training.plan.support import OTHER_TASKS, RETIRED, UNSUPPORTED, Unsupported

DOCUMENT = Path(__file__).with_name("flags.md")
_HEADING = "## "
_REFUSED = re.compile(r"\| `--.*\| refused \|")


def with_refused_flags(document: str) -> str:
    """Returns the document with the refused flags of each topic at the end of the topic's table.

    Args:
        document: text of flags.md, with or without such rows.
    """
    lines: list[str] = []
    topic = ""
    for line in (*document.splitlines(), _HEADING):
        if line.startswith(_HEADING):
            while lines and lines[-1] == "":
                lines.pop()
            lines += [*_rows(topic), "", line]
            topic = line.removeprefix(_HEADING)
        elif not _REFUSED.match(line):
            lines.append(line)
    return "\n".join(lines).removesuffix(_HEADING).rstrip() + "\n"


def _rows(topic: str) -> Iterator[str]:
    """Yields a row for all flags of a topic that are refused for the same reason."""
    flags: dict[str, list[str]] = {}
    for entry in (*UNSUPPORTED, *OTHER_TASKS, *RETIRED):
        if entry.topic == topic:
            flags.setdefault(_cell(entry), []).extend(entry.flags.split())
    for cell, same in flags.items():
        yield f"| {' '.join(f'`{flag}`' for flag in same)} | refused | {cell} |"


def _cell(entry: Unsupported) -> str:
    if entry.advice.startswith("drop it"):
        return entry.reason
    return f"{entry.reason}: " + re.sub(r"--[\w-]+( mock| local)?", lambda found: f"`{found[0]}`", entry.advice)


if __name__ == "__main__":
    DOCUMENT.write_text(with_refused_flags(DOCUMENT.read_text()))
