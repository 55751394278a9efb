"""In which order two processes run the test files, so that neither is idle for long.

Whoever takes a file keeps it. The longest files come first, so that what is left at the end is short. A test that is
``alone`` waits for the end of whatever the other process runs: such files come where only short tests are left.
"""

from collections.abc import Sequence

import pytest

LONGEST = (
    "tests/parity/gradients/test_gradients_equal_stock.py",
    "tests/virtual_gpu/test_cases.py",
    "tests/parity/gradients/test_gradients_in_layouts.py",
    "tests/parity/te/test_gradients.py",
    "tests/parity/paired/test_paired_gradients.py",
    "tests/cli/benchmarks/test_demo.py",
    "tests/parity/te/test_fp8.py",
    "tests/virtual_gpu/test_mutants.py",
    "tests/parity/te/test_layouts.py",
)
"""Files that take more than forty seconds, the longest first."""
SHORT = "tests/unit/"
"""The folder of tests that take less than a few seconds."""
LAST = "tests/unit/planning/"
"""Those of them that are left for the end."""


def place(file: str, has_alone: bool) -> int:
    """Where a file comes: equal ones stay in their order.

    Args:
        file: path from the root of the repository.
        has_alone: whether one of its tests is ``alone``.
    """
    if file in LONGEST:
        return LONGEST.index(file)
    if has_alone:
        return len(LONGEST) + 2
    if not file.startswith(SHORT):
        return len(LONGEST)
    return len(LONGEST) + (3 if file.startswith(LAST) else 1)


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests, file by file."""
    alone = {file_of(item) for item in items if item.get_closest_marker("alone")}
    return sorted(items, key=lambda item: place(file_of(item), file_of(item) in alone))


def file_of(item: pytest.Item) -> str:
    """Path of a test's file from the root of the repository."""
    return item.nodeid.partition("::")[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a process of pytest-xdist; a single one has nobody to wait for."""
    if hasattr(config, "workerinput"):
        items[:] = in_order(items)


class Alone:
    """Tells which tests of a process are alone: those with the mark, of those with ``setup=True`` a file's first."""

    def __init__(self) -> None:
        self._set_up: set[str] = set()

    def __call__(self, item: pytest.Item) -> bool:
        """Whether the test, which is next, reads clocks itself or in its file's fixtures."""
        mark = item.get_closest_marker("alone")
        if mark is None:
            return False
        is_first = file_of(item) not in self._set_up
        self._set_up.add(file_of(item))
        return is_first or not mark.kwargs.get("setup", False)
