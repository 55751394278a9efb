"""Results of a part of the check, saved one by one: what was measured before a limit or a crash is kept.

A file has a JSON object in each line, with the name of what was measured, and its values or an error.
"""

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NUM_FRAMES = 6
"""Innermost frames of an error that are kept."""


class Recorder:
    """Appends the results of one part to its file.

    Attributes:
        num_errors: results that are errors.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        """
        Args:
            path: the part's file; made anew.
            limit_s: time that the part may take from now on, in seconds.
        """
        self._path = path
        self._end_s = time.monotonic() + limit_s
        self.num_errors = 0
        path.write_text("")

    def add(self, name: str, **values: Any) -> None:
        """Saves a result. It is on the disk when the call returns.

        Args:
            values: what JSON can hold.
        """
        with self._path.open("a") as file:
            file.write(json.dumps({"name": name, **values}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def fail(self, name: str, error: str, **values: Any) -> None:
        """Saves a result that is wrong, with what was measured.

        Args:
            error: what was expected, and what was found.
            values: what JSON can hold.
        """
        self.num_errors += 1
        self.add(name, error=error, **values)

    @contextmanager
    def guarded(self, name: str, **values: Any) -> Iterator[None]:
        """Inside the context an exception becomes a result with ``error``, and the part goes on.

        Args:
            values: further values of that result.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - saved, counted, and shown in the summary
            frames = traceback.format_tb(error.__traceback__)[-_NUM_FRAMES:]
            self.fail(name, f"{type(error).__name__}: {error}", **values, frames="".join(frames))

    def time_left_s(self) -> float:
        """Seconds of the part's limit that are left; negative when it has passed."""
        return self._end_s - time.monotonic()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The results in a part's file. A line that was cut off by the end of the part is left out.

    Returns:
        One object for each complete line; none where there is no file.
    """
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # a complete line ends with a newline
