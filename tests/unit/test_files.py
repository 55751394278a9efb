"""Records as JSON: what goes in comes out, and what does not fit is refused with its place."""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.files.reader import Range, RecordError, from_plain
from megatron_lancet.files.records import to_plain


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Part:
    name: str
    size_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.size_ms < 0:
            raise ValueError(f"size_ms {self.size_ms} is below 0")


@dataclass(frozen=True)
class Whole:
    count: int
    colour: Colour
    is_new: bool
    parts: tuple[Part, ...] = ()
    pair: tuple[int, str] = (0, "")
    best: Part | None = None
    by_name: dict[str, Part] = field(default_factory=dict)
    num_ranks: Annotated[int, Range(1, 8)] = 1


PLAIN = {"count": 3, "colour": "red", "is_new": True}
FINITE = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
PARTS = st.builds(Part, st.text(), FINITE)
WHOLES = st.builds(
    Whole,
    st.integers(),
    st.sampled_from(Colour),
    st.booleans(),
    st.lists(PARTS).map(tuple),
    st.tuples(st.integers(), st.text()),
    st.none() | PARTS,
    st.dictionaries(st.text(), PARTS),
    st.integers(1, 8),
)


@given(WHOLES)
def test_records_are_read_from_json_as_written(whole):
    again = from_plain(Whole, json.loads(json.dumps(to_plain(whole))), "record")
    assert again == whole
    assert type(again.colour) is Colour


def test_missing_record_fields_take_their_default():
    assert from_plain(Whole, PLAIN, "record") == Whole(3, Colour.RED, True)
    part = from_plain(Part, {"name": "a", "size_ms": 2}, "part")
    assert part == Part("a", 2.0)
    assert type(part.size_ms) is float


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 1.5}, "record.count: expected an integer, found 1.5"),
        ({"count": True}, "record.count: expected an integer, found True"),
        ({"count": None}, "record.count: expected an integer, found None"),
        ({"is_new": 1}, "record.is_new: expected true or false, found 1"),
        ({"colour": "green"}, "record.colour: expected one of red, blue, found 'green'"),
        ({"colour": {}}, "record.colour: expected one of red, blue, found {}"),
        ({"parts": "ab"}, "record.parts: expected a list, found 'ab'"),
        ({"parts": [{"name": "a"}, 3]}, "record.parts[1]: expected an object, found 3"),
        ({"parts": [{"name": 3}]}, "record.parts[0].name: expected text, found 3"),
        ({"parts": [{"name": "a", "size_ms": "1"}]}, "record.parts[0].size_ms: expected a number, found '1'"),
        ({"parts": [{"name": "a", "size_ms": float("nan")}]}, "size_ms: expected a finite number, found nan"),
        ({"parts": [{"name": "a", "size_ms": float("inf")}]}, "size_ms: expected a finite number, found inf"),
        ({"parts": [{"name": "a", "size_ms": 10**400}]}, "size_ms: expected a finite number, found 1000"),
        ({"parts": [{"name": "a", "size_ms": -1}]}, "record.parts[0]: size_ms -1.0 is below 0"),
        ({"parts": [{}]}, "record.parts[0]: field 'name' is missing"),
        ({"pair": [1]}, "record.pair: expected a list of 2, found [1]"),
        ({"pair": [1, 2]}, "record.pair[1]: expected text, found 2"),
        ({"best": 7}, "record.best: expected an object, found 7"),
        ({"by_name": []}, "record.by_name: expected an object, found []"),
        ({"by_name": {"x": {"name": None}}}, "record.by_name.x.name: expected text, found None"),
        ({"num_ranks": 0}, "record.num_ranks: expected 1 to 8, found 0"),
        ({"num_ranks": 9}, "record.num_ranks: expected 1 to 8, found 9"),
        ({"num_ranks": "9"}, "record.num_ranks: expected an integer, found '9'"),
        (
            {"weight": 1},
            "record: unknown field 'weight'; known: count, colour, is_new, parts, pair, best, by_name",
        ),
    ],
)
def test_record_with_a_wrong_type_is_refused_with_its_place(changes, message):
    with pytest.raises(RecordError) as refusal:
        from_plain(Whole, {**PLAIN, **changes}, "record")
    assert message in str(refusal.value)


def test_record_error_shortens_a_long_value():
    with pytest.raises(RecordError) as refusal:
        from_plain(Whole, {**PLAIN, "count": "9" * 1000}, "record")
    assert len(str(refusal.value)) < 120


def test_json_without_a_record_is_refused():
    with pytest.raises(RecordError, match="record: expected an object, found None"):
        from_plain(Whole, None, "record")
