"""In which order two processes run the test files, so that neither is idle for long.

Whoever takes a file keeps it. The longest files come first, so that what is left at the end is short. A test that is
``alone`` waits for the end of whatever the other process runs: such files come among short tests, which are the last.
"""

from collections.abc import Collection, Sequence

import pytest

LONGEST = (
    "tests/parity/gradients/test_gradients_equal_stock.py",
    "tests/parity/te/test_gradients.py",
    "tests/parity/gradients/test_gradients_in_layouts.py",
    "tests/cli/benchmarks/test_demo.py",
    "tests/features/test_deleted_features.py",
    "tests/gpu/check/test_smoke.py",
    "tests/virtual_gpu/test_cases.py",
    "tests/parity/stock_overlap/test_stock_overlap.py",
    "tests/gpu/check/test_gradients.py",
    "tests/parity/paired/test_paired_gradients.py",
    "tests/features/shortcut/test_shortcut_gradients.py",
    "tests/parity/te/test_fp8.py",
    "tests/virtual_gpu/test_mutants.py",
    "tests/parity/check/test_check.py",
    "tests/parity/batches/test_document_runs.py",
    "tests/parity/documents/test_documents.py",
    "tests/parity/te/test_layouts.py",
)
"""Files that take more than forty seconds, the longest first."""
SHORT = "tests/unit/"
"""The folder of tests that take less than a few seconds."""


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests, file by file."""
    files = list(dict.fromkeys(file_of(item) for item in items))
    alone = {file_of(item) for item in items if item.get_closest_marker("alone")}
    place = {file: index for index, file in enumerate(files_in_order(files, alone))}
    return sorted(items, key=lambda item: place[file_of(item)])


def files_in_order(files: Sequence[str], alone: Collection[str]) -> list[str]:
    """
    Args:
        files: paths from the root of the repository.
        alone: those of them with tests that are ``alone``. Far from each other they wait for none of their own kind.
    """
    first = [file for file in LONGEST if file in files and file not in alone]
    others = [file for file in files if file not in LONGEST and file not in alone]
    short = [file for file in others if file.startswith(SHORT)]
    found = [*first, *(file for file in others if file not in short)]
    waiting = sorted(alone, reverse=True)  # long ones, in tests/parity/runs, early
    for index, file in enumerate(waiting):
        begin, end = (len(short) * number // len(waiting) for number in (index, index + 1))
        found += [file, *short[begin:end]]
    return found if waiting else [*found, *short]


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
