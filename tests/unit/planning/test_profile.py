"""Profiles as text: fields that came later are left out where they are unknown."""

import dataclasses
import json

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.files import RecordError
from megatron_lancet.planning.profile import ChunkRouting, profile_from_json
from megatron_lancet.schedule.plan import ChunkDim

OF_BEFORE = ChunkRouting(1, ChunkDim.BATCH, 1, 0, (4, 6), (7, 13))
WITH_TOKENS = dataclasses.replace(OF_BEFORE, sent_tokens=(3, 4), received_tokens=(4, 3))


def profile_with(*routing):
    return dataclasses.replace(synthetic_profile(Machine()), routing=routing)


def test_profile_without_distinct_rows_is_as_before():
    text = profile_with(OF_BEFORE).to_json()
    assert "tokens" not in json.dumps(json.loads(text)["routing"])
    assert "prob_bytes" not in text
    assert profile_from_json(text, "p.json") == profile_with(OF_BEFORE)
    assert profile_from_json(profile_with(WITH_TOKENS).to_json(), "p.json") == profile_with(WITH_TOKENS)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"received_tokens": None}, "sent_tokens and received_tokens must be both given, or neither"),
        ({"sent_tokens": [3, 4, 5]}, r"routing\[0\] must have rows for each of 2 ranks"),
    ],
)
def test_distinct_rows_of_some_ranks_only_are_refused(changes, problem):
    value = json.loads(profile_with(WITH_TOKENS).to_json())
    value["routing"][0] |= changes
    with pytest.raises(RecordError, match=problem):
        profile_from_json(json.dumps(value), "p.json")
