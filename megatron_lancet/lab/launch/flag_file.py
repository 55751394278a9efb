"""Lists of Megatron's flags: a file of flags in place of a launch script, and flags with their values."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lancet.errors import UsageError


def flags_in(file: Path) -> list[str] | None:
    """Returns the flags in a file; None if its first word is no flag.

    Flags may take several lines, with or without a backslash at their ends. ``#`` starts a comment.

    Raises:
        UsageError: a quotation is not closed.
    """
    lines = [_without_comment(line) for line in file.read_text(errors="replace").splitlines()]
    first = next((line.split()[0] for line in lines if line), "")
    if not first.startswith("--"):
        return None
    try:
        return shlex.split("\n".join(line.removesuffix("\\") for line in lines))
    except ValueError as error:
        numbers = (index for index, line in enumerate(lines, 1) if line.count('"') % 2 or line.count("'") % 2)
        raise UsageError(f"{file}, line {next(numbers, len(lines))}: {error}. Close the quotation.") from error


def _without_comment(line: str) -> str:
    for found in re.finditer(r"(?:^|\s)#", line):
        before = line[: found.start()]
        if before.count('"') % 2 == 0 and before.count("'") % 2 == 0:
            return before.strip()
    return line.strip()


def split_flags(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields each flag with its values; ``--flag=value`` is split."""
    flag: list[str] = []
    for word in words:
        if word.startswith("--"):
            if flag:
                yield tuple(flag)
            name, equals, value = word.partition("=")
            flag = [name, value] if equals else [name]
        elif flag:
            flag.append(word)
        else:
            raise UsageError(f"expected a flag of Megatron, found {word!r}.")
    if flag:
        yield tuple(flag)
