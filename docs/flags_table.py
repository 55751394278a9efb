"""Writes the rows of refused flags in flags.md: ``make flags``, or ``python docs/flags_table.py``.

The product has these flags as a table, :mod:`megatron_lancet.training.plan.support`. The other rows are written by
hand, and checked by ``tests/unit/training/test_flags_table.py``.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from megatron_lancet.training.plan.support import OTHER_TASKS, RETIRED, UNSUPPORTED, Topic, Unsupported

DOCUMENT = Path(__file__).with_name("flags.md")
_HEADING = "## "
_REFUSED = re.compile(r"\| `--.*\| refused \|")


def with_refused_flags(document: str) -> str:
    """The document with the refused flags of each topic at the end of the topic's table.

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
    """A row for the flags that are refused for the same reason."""
    refused = [one for one in (*UNSUPPORTED, *OTHER_TASKS, *RETIRED) if one.topic == topic and one.topic in Topic]
    reasons = list(dict.fromkeys(map(_cell, refused)))
    for cell, same in groupby(sorted(refused, key=lambda one: reasons.index(_cell(one))), key=_cell):
        yield f"| {' '.join(f'`{one.flag}`' for one in same)} | refused | {cell} |"


def _cell(one: Unsupported) -> str:
    if one.advice.startswith("drop it"):
        return one.reason
    return f"{one.reason}: " + re.sub(r"--[\w-]+( mock| local)?", lambda found: f"`{found[0]}`", one.advice)


if __name__ == "__main__":
    DOCUMENT.write_text(with_refused_flags(DOCUMENT.read_text()))
