"""Formats and parses layer numbers and ranks as text: ``1, 3-40``."""

from collections.abc import Iterable, Sequence

_MAX_NUMBER = 100_000
"""Upper limit: a number in a damaged file must not fill the memory."""
_MAX_RUNS = 8
"""Longer lists of ranks are truncated."""


def ranges(numbers: Iterable[int]) -> str:
    """The numbers in rising order, neighbours joined: ``1, 3-40``; ``none`` if there are none."""
    return ", ".join(_runs(numbers)) or "none"


def parse_ranges(text: str) -> list[int]:
    """Parses the text that :func:`ranges` makes of numbers.

    Raises:
        ValueError: the text has another form.
    """
    numbers: list[int] = []
    for run in [] if text == "none" else text.split(", "):
        first, _, last = run.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()) or int(last or first) > _MAX_NUMBER:
            raise ValueError(f"expected numbers such as '1, 3-40', found {text!r}")
        numbers += range(int(first), int(last or first) + 1)
    if ranges(numbers) != text:
        raise ValueError(f"expected numbers such as '1, 3-40', found {text!r}")
    return numbers


def name_ranks(ranks: Sequence[int]) -> str:
    """Formats ranks as ``rank 3`` or ``ranks 0-2, 5``; a long list is truncated."""
    runs = _runs(ranks)
    shown = ", ".join(runs[:_MAX_RUNS]) + (", ..." if len(runs) > _MAX_RUNS else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _runs(numbers: Iterable[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
