"""Profiles as text: entries leave out what is unknown, and only today's version is read."""

import dataclasses
import json

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.profile import PROFILE_VERSION, ChunkRouting, profile_from_json
from megatron_lancet.schedule.plan import ChunkDim

WITHOUT_TOKENS = ChunkRouting(1, ChunkDim.BATCH, 1, 0, (4, 6), (7, 13))
WITH_TOKENS = dataclasses.replace(WITHOUT_TOKENS, sent_tokens=(3, 4), received_tokens=(4, 3))


def profile_with(*routing):
    return dataclasses.replace(synthetic_profile(Machine()), routing=routing)


def test_a_profile_without_distinct_rows_has_no_field_for_them():
    text = profile_with(WITHOUT_TOKENS).to_json()
    assert "tokens" not in json.dumps(json.loads(text)["routing"])
    assert profile_from_json(text, "p.json") == profile_with(WITHOUT_TOKENS)
    assert profile_from_json(profile_with(WITH_TOKENS).to_json(), "p.json") == profile_with(WITH_TOKENS)


@pytest.mark.parametrize("version", [1, PROFILE_VERSION + 1, None])
def test_a_profile_of_another_version_is_refused(version):
    text = json.dumps({**json.loads(profile_with().to_json()), "version": version})
    expected = f"expected version {PROFILE_VERSION} of the profile's format"
    with pytest.raises(RecordError, match=f"{expected}, found {version}"):
        profile_from_json(text, "p.json")


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
