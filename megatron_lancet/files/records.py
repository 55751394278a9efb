"""Records as plain values, which ``reader.py`` reads back."""

import dataclasses
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, ClassVar, Self

OMITTED_AT_DEFAULT = types.MappingProxyType({"omitted_at_default": True})
"""Metadata of a dataclass field that is written only if it differs from its default.

Plans that users read and edit stay short, and so do the many ops and chunks of a profile.
"""


class Named(ABC):
    """Base of objects that are known by name: files and flags hold the name.

    Attributes:
        name: names the object, and no other one of its kind.
        absent: what to do about a name that this installation does not know, as the end of a message.
    """

    name: str
    absent: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def known(cls) -> Mapping[str, Self]:
        """All of this kind, by name."""


def to_plain(value: Any) -> Any:
    """Convert dataclasses, tuples, enums and names into what ``json.dumps`` accepts; fields keep their order."""
    if isinstance(value, Named):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in _written_fields(value)}
    if isinstance(value, list | tuple):
        return [to_plain(part) for part in value]
    if isinstance(value, dict):
        return {name: to_plain(part) for name, part in value.items()}
    return value.value if isinstance(value, Enum) else value


def _written_fields(value: Any) -> Iterator[dataclasses.Field[Any]]:
    for field in dataclasses.fields(value):
        if not (OMITTED_AT_DEFAULT.items() <= field.metadata.items() and getattr(value, field.name) == field.default):
            yield field
