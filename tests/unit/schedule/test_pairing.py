"""Whose turn it is during a backward: a rule of two numbers, alike on every rank."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.schedule.pairing import PairedTurns

COUNTS = st.integers(0, 200)
turns_of_pairs = st.builds(PairedTurns, COUNTS, COUNTS)


@given(turns_of_pairs)
def test_first_turn_is_before_the_backward_and_all_by_its_end(turns):
    assert turns.done_by(0) == 1
    if turns.num_backward_waits:
        assert turns.done_by(turns.num_backward_waits) == turns.num_forward_waits + 1


@given(turns_of_pairs)
def test_turns_only_add_up_and_no_place_has_more_than_its_share(turns):
    done = [turns.done_by(place) for place in range(turns.num_backward_waits + 1)]
    steps = [after - before for before, after in pairwise(done)]
    assert all(step >= 0 for step in steps)
    assert not steps or max(steps) - min(steps) <= 1


@given(COUNTS)
def test_equal_numbers_of_waits_take_turns_one_by_one(count):
    turns = PairedTurns(count, count)
    assert [turns.done_by(place) for place in range(count + 1)] == list(range(1, count + 2))


@given(turns_of_pairs)
def test_the_following_micro_batch_begins_at_the_last_wait_only(turns):
    begins = [place for place in range(turns.num_backward_waits + 1) if turns.begins_next(place)]
    assert begins == [turns.num_backward_waits] * (turns.num_backward_waits > 0)


@pytest.mark.parametrize(
    ("num_forward_waits", "num_backward_waits", "done"),
    [
        (6, 6, [1, 2, 3, 4, 5, 6, 7]),
        (3, 6, [1, 1, 2, 2, 3, 3, 4]),
        (6, 3, [1, 3, 5, 7]),
        (4, 6, [1, 1, 2, 3, 3, 4, 5]),
        (0, 2, [1, 1, 1]),
        (2, 0, [1]),
    ],
)
def test_turns_done_by_each_place(num_forward_waits, num_backward_waits, done):
    turns = PairedTurns(num_forward_waits, num_backward_waits)
    assert [turns.done_by(place) for place in range(num_backward_waits + 1)] == done


def test_more_waits_than_planned_are_an_error():
    with pytest.raises(AssertionError):
        PairedTurns(2, 2).done_by(3)
