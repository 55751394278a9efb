"""Files of records: dataclasses to JSON and back, checked field by field.

The reader is written by hand because neither msgspec nor pydantic gives its messages, for example ``plan.json.plan:
expected an object, found 3``, for frozen dataclasses. msgspec 0.22 ignores unknown fields and names neither the value
that it found nor the key of a dict. pydantic 2.14 ignores unknown fields, accepts NaN and reads 1e400 as infinity
unless each dataclass has a configuration of its own. Both are compiled packages that training does not need otherwise.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from megatron_lancet.files.records import Named

MAX_COUNT = 10**5
"""Largest number of ranks, chunks or experts in a file: a damaged number must not fill the memory."""
_type_hints = cache(typing.get_type_hints)
_IN_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number in a file, both included, for a field ``Annotated[int, Range(1, 10)]`` of a dataclass.

    Only the reader checks them, with the field's place; code that makes the dataclass in memory is trusted.
    """

    low: int
    high: int


class RecordError(ValueError):
    """A file has unexpected content. The message says where, what was expected and what was found."""


def from_plain[Record](kind: type[Record], value: Any, where: str) -> Record:
    """Make the dataclass ``kind`` from parsed JSON; unknown fields are errors, missing ones take their default.

    Args:
        where: name of ``value`` in messages, for example ``plan.json``.

    Raises:
        RecordError: a field is unknown, missing, or not of its type.
    """
    converted: Record = _convert(kind, value, where)
    return converted


def differences(*records: Mapping[str, Any], absent: Any = None) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The fields whose values are not equal in all records: name, and the value in each record.

    Args:
        absent: value of a field that a record does not have.
    """
    for name in dict.fromkeys(name for record in records for name in record):
        values = tuple(record.get(name, absent) for record in records)
        if any(value != values[0] for value in values):
            yield name, values


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        RecordError: the text is something else.
    """
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"{where}: no JSON, or damaged: {error}") from error
    if not isinstance(value, dict):
        raise RecordError(f"{where}: expected an object, found {type(value).__name__}")
    return value


def take_version(value: dict[str, Any], expected: int | str, what: str, where: str) -> None:
    """Remove the field ``version`` from a parsed object.

    Args:
        what: name of the versioned object in messages, for example ``the plan``.

    Raises:
        RecordError: the version is not ``expected``.
    """
    version = value.pop("version", None)
    if version != expected or isinstance(version, bool):
        raise RecordError(f"{where}: expected version {expected} of {what}'s format, found {version!r}")


def parse_record[Record](kind: type[Record], text: str, version: int | str, what: str, where: str) -> Record:
    """Make the dataclass ``kind`` from JSON text that has a field ``version`` as well; see :func:`take_version`.

    Raises:
        RecordError: the text is damaged, of another version, or something else.
    """
    value = parse_object(text, where)
    take_version(value, version, what, where)
    return from_plain(kind, value, where)


def read_text(path: Path) -> str:
    """Read a file's text.

    Raises:
        RecordError: the file can't be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(f"{path}: can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RecordError(f"{path}: no JSON, or damaged: {error}") from error


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin is Annotated:
        base, *bounds = typing.get_args(kind)
        number = _convert(base, value, where)
        for bound in bounds:
            if not bound.low <= number <= bound.high:
                raise _unexpected(f"{bound.low} to {bound.high}", value, where)
        return number
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        if value is None and len(options) < len(typing.get_args(kind)):
            return None
        assert len(options) == 1, kind
        return _convert(options[0], value, where)
    if origin is tuple:
        return _tuple(typing.get_args(kind), value, where)
    if origin is dict:
        if not isinstance(value, dict):
            raise _unexpected("an object", value, where)
        _, part_kind = typing.get_args(kind)
        return {name: _convert(part_kind, part, f"{where}.{name}") for name, part in value.items()}
    if issubclass(kind, Named):
        known = kind.known()
        if value not in list(known):
            raise RecordError(f"{_unexpected(_choices(known), value, where)}{kind.absent}")
        return known[value]
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    if issubclass(kind, Enum):
        return kind(_one_of([option.value for option in kind], value, where))
    return _scalar(kind, value, where)


def _one_of(allowed: list[Any], value: Any, where: str) -> Any:
    if value not in allowed:
        raise _unexpected(_choices(allowed), value, where)
    return value


def _choices(allowed: Iterable[Any]) -> str:
    return f"one of {', '.join(map(str, allowed))}"


def _scalar(kind: type, value: Any, where: str) -> Any:
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError as error:
            raise _unexpected("a finite number", value, where) from error
    if type(value) is not kind:  # a bool is an int to isinstance
        raise _unexpected(_IN_WORDS[kind], value, where)
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise _unexpected("a finite number", value, where)
    return value


def _tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _unexpected("a list", value, where)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(value) != len(kinds):
        raise _unexpected(f"a list of {len(kinds)}", value, where)
    return tuple(
        _convert(kind, part, f"{where}[{index}]") for index, (kind, part) in enumerate(zip(kinds, value, strict=True))
    )


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _unexpected("an object", value, where)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = [name for name in value if name not in fields]
    if unknown:
        raise RecordError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(fields)}")
    hints = _type_hints(kind, include_extras=True)
    given = {}
    for name, field in fields.items():
        if name in value:
            given[name] = _convert(hints[name], value[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(f"{where}: field {name!r} is missing")
    try:
        return kind(**given)
    except ValueError as error:
        raise RecordError(f"{where}: {error}") from error


def _unexpected(expected: str, value: Any, where: str) -> RecordError:
    found = repr(value)
    return RecordError(f"{where}: expected {expected}, found {found if len(found) <= 60 else found[:57] + '...'}")
