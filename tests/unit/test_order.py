"""The order of test files in two processes, and which tests run while nobody runs another one."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import order

REPOSITORY = Path(__file__).parents[2]
SHORT, LAST, LAUNCHED = "tests/unit/test_a.py", "tests/unit/planning/test_b.py", "tests/cli/test_c.py"
WITH_ALONE = "tests/faults/test_d.py"


def item(file, name="test", **marks):
    return SimpleNamespace(nodeid=f"{file}::{name}", get_closest_marker=marks.get)


def alone(file, name="test", **settings):
    return item(file, name, alone=pytest.mark.alone(**settings).mark)


def test_longest_files_exist():
    assert [file for file in order.LONGEST if not (REPOSITORY / file).exists()] == []
    assert (REPOSITORY / order.LAST).is_dir()


def test_files_with_a_test_that_is_alone_come_where_only_short_ones_are_left():
    longer, longest = (item(file) for file in (order.LONGEST[1], order.LONGEST[0]))
    waits, beside = alone(WITH_ALONE, "one"), item(WITH_ALONE, "two")
    short, last, launched = item(SHORT), item(LAST), item(LAUNCHED)
    found = order.in_order([last, short, waits, beside, launched, longer, longest])
    assert found == [longest, longer, launched, short, waits, beside, last]


def test_each_test_with_the_mark_is_alone():
    is_alone = order.Alone()
    assert [is_alone(alone(WITH_ALONE, name)) for name in "abc"] == [True] * 3
    assert not is_alone(item(WITH_ALONE))


def test_of_tests_whose_fixtures_read_clocks_the_first_of_each_file_is_alone():
    is_alone = order.Alone()
    tests = [alone(file, name, setup=True) for file in (SHORT, WITH_ALONE) for name in "ab"]
    assert [is_alone(test) for test in tests] == [True, False, True, False]
