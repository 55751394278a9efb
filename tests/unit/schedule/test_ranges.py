"""Numbers as text and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.schedule.ranges import name_ranks, parse_ranges, ranges


@given(st.sets(st.integers(1, 60)))
def test_ranges_of_ranks_are_parsed_as_printed(numbers):
    assert parse_ranges(ranges(numbers)) == sorted(numbers)


@pytest.mark.parametrize(
    "text", ["", "x", "3-1", "1,2", "1, 2", "1-2, 3", "2, 1", "1-99999999999", "-", "1-", "\u00b2"]
)
def test_parsing_of_ranges_refuses_other_text(text):
    with pytest.raises(ValueError, match="expected numbers such as"):
        parse_ranges(text)


def test_ranges_join_neighbouring_numbers():
    assert ranges([5, 1, 3, 4]) == "1, 3-5"
    assert ranges([]) == "none"


def test_ranks_are_named_by_ranges():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert name_ranks(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, ..."
