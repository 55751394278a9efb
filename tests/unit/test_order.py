"""The order of test files in two processes, and which tests run while nobody runs another one."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import order

REPOSITORY = Path(__file__).parents[2]
LAUNCHED, SHORT = "tests/cli/test_c.py", [f"tests/unit/test_{name}.py" for name in "abcd"]
WITH_ALONE, WITH_ALONE_TOO = "tests/faults/test_d.py", "tests/parity/runs/test_e.py"


def item(file, name="test", **marks):
    return SimpleNamespace(nodeid=f"{file}::{name}", get_closest_marker=marks.get)


def alone(file, name="test", **settings):
    return item(file, name, alone=pytest.mark.alone(**settings).mark)


def test_longest_files_exist():
    assert [file for file in order.LONGEST if not (REPOSITORY / file).exists()] == []


def test_longest_files_are_first_and_short_ones_last():
    longest = order.LONGEST[1], order.LONGEST[0]
    found = order.files_in_order([*SHORT, LAUNCHED, *longest], set())
    assert found == [*reversed(longest), LAUNCHED, *SHORT]
    assert order.files_in_order(SHORT, set()) == SHORT
    assert order.files_in_order([WITH_ALONE, LAUNCHED], {WITH_ALONE}) == [LAUNCHED, WITH_ALONE]


def test_files_with_tests_that_run_alone_are_far_apart():
    files = [WITH_ALONE, LAUNCHED, WITH_ALONE_TOO, *SHORT]
    found = order.files_in_order(files, {WITH_ALONE, WITH_ALONE_TOO})
    assert found == [LAUNCHED, WITH_ALONE_TOO, *SHORT[:2], WITH_ALONE, *SHORT[2:]]


def test_tests_of_a_file_keep_their_order():
    first, second = item(WITH_ALONE, "one"), alone(WITH_ALONE, "two")
    short, launched = item(SHORT[0]), item(LAUNCHED)
    assert order.in_order([first, second, launched, short]) == [launched, first, second, short]


def test_each_test_with_the_mark_is_alone():
    is_alone = order.Alone()
    assert [is_alone(alone(WITH_ALONE, name)) for name in "abc"] == [True] * 3
    assert not is_alone(item(WITH_ALONE))


def test_first_test_of_a_file_with_clocks_in_fixtures_is_alone():
    is_alone = order.Alone()
    tests = [alone(file, name, setup=True) for file in (LAUNCHED, WITH_ALONE) for name in "ab"]
    assert [is_alone(test) for test in tests] == [True, False, True, False]
