"""Sizes of folders, files and functions."""

import ast
import functools
import statistics
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOTS = ("megatron_lancet", "tests", "benchmarks", "tools")
MAX_FILES_OF_A_FOLDER = 14
MAX_LINES_OF_A_FILE = 400
MAX_LINES_OF_A_FUNCTION = 60
MAX_MEDIAN_LINES = 100
MAX_LENGTH_OF_A_NAME = 60
"""So that the name and the parameters of a test fit on a line of pytest's summary."""


def python_files(root: str) -> list[Path]:
    return [path for path in sorted((REPOSITORY / root).rglob("*.py")) if path.name != "__init__.py"]


def num_lines(text: str) -> int:
    """Blank lines don't count."""
    return sum(bool(line.strip()) for line in text.splitlines())


@functools.cache
def functions_in(text: str) -> list[tuple[str, int]]:
    """Name and lines of each function and method, docstring included."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    lines = text.splitlines()
    return [(node.name, num_lines("\n".join(lines[node.lineno - 1 : node.end_lineno]))) for node in functions]


def long_functions(text: str, limit: int) -> dict[str, int]:
    """Lines of the functions and methods that have more than ``limit`` of them."""
    return {name: count for name, count in functions_in(text) if count > limit}


def long_tests(text: str) -> list[str]:
    """Names of the test functions and methods that are too long."""
    return [name for name, _ in functions_in(text) if name.startswith("test_") and len(name) > MAX_LENGTH_OF_A_NAME]


@pytest.mark.parametrize("root", ROOTS)
def test_folders_have_few_python_files(root):
    counts = Counter(str(path.parent.relative_to(REPOSITORY)) for path in python_files(root))
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES_OF_A_FOLDER} == {}


@pytest.mark.parametrize("root", ROOTS)
def test_files_have_at_most_400_lines(root):
    counts = {str(path.relative_to(REPOSITORY)): len(path.read_text().splitlines()) for path in python_files(root)}
    assert {file: count for file, count in counts.items() if count > MAX_LINES_OF_A_FILE} == {}


@pytest.mark.parametrize("root", ROOTS)
def test_functions_have_at_most_60_lines(root):
    found = {
        str(path.relative_to(REPOSITORY)): long_functions(path.read_text(), MAX_LINES_OF_A_FUNCTION)
        for path in python_files(root)
    }
    assert {file: functions for file, functions in found.items() if functions} == {}


def test_names_of_tests_have_at_most_60_characters():
    found = {str(path.relative_to(REPOSITORY)): long_tests(path.read_text()) for path in python_files("tests")}
    assert {file: names for file, names in found.items() if names} == {}


def test_median_product_file_has_fewer_than_100_lines():
    assert statistics.median(num_lines(path.read_text()) for path in python_files("megatron_lancet")) < MAX_MEDIAN_LINES


def test_lines_of_long_functions_are_counted_without_blank_ones():
    source = "def short():\n    pass\n\nclass A:\n    async def long(self):\n        a = 1\n\n        return a\n"
    assert long_functions(source, 2) == {"long": 3}


def test_long_names_are_those_of_tests_and_of_methods_too():
    longest = "test_" + 55 * "a"
    source = f"def {longest}(): ...\ndef {61 * 'b'}(): ...\nclass A:\n    async def {longest}c(self): ...\n"
    assert long_tests(source) == [f"{longest}c"]
