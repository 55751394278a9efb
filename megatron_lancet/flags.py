"""How a field of a dataclass becomes a flag of the command line: name, values, help, unit and range."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatron_lancet.errors import UsageError
from megatron_lancet.files.records import Named

_METADATA_KEY = "flag"


@dataclass(frozen=True)
class Flag:
    """How the command line sets a field.

    Attributes:
        help: text of ``--help``; ``{default}`` in it is the field's default.
        parsed_as: type of the parsed argument. It is plain, because Megatron saves its arguments in checkpoints.
        read: converts the parsed argument to the field's value.
        choices: words that the flag accepts; empty if it accepts any text.
        none_word: the choice that leaves the field at None, if there is one.
        metavar: name of the value in ``--help``; None to list the choices.
        unit: unit of a number, for messages; empty for a count.
        at_least: smallest value, if there is a bound.
        above: bound that a finite value must exceed, if there is one.
        advice: sentence that follows the refusal of a value outside the range.
        limits_plan: whether a value limits the choice of a plan.
        name: the flag's name, if it does not follow from the field's name.
        same_on_all_ranks: whether ranks with different values would wait for each other forever. Such values are plain.
        unmodelled: why a modelled step refuses another value than the default; empty if it does not.
        not_with_spec: why Megatron's own script can't have another value than the default, as the end of a sentence;
            empty if it can.
        unchecked: for a flag that a check on a few CPU ranks leaves out: what the check does not cover for that reason,
            for its report; empty where that is nothing worth a line. None for a flag that the check keeps.
    """

    help: str
    parsed_as: type = str
    read: Callable[[Any], Any] = lambda value: value
    choices: tuple[str, ...] = ()
    none_word: str | None = None
    metavar: str | None = None
    unit: str = ""
    at_least: int | None = None
    above: float | None = None
    advice: str = ""
    limits_plan: bool = False
    name: str = ""
    same_on_all_ranks: bool = False
    unmodelled: str = ""
    not_with_spec: str = ""
    unchecked: str | None = None

    def value_of(self, parsed: Any) -> Any:
        """Converts a parsed argument to the field's value."""
        return None if parsed in (None, self.none_word) else self.read(parsed)

    def check(self, name: str, value: Any) -> None:
        """Checks a value of the flag with this name.

        Raises:
            UsageError: the value is outside the range.
        """
        if self.at_least is not None and not self.at_least <= value < math.inf:
            raise UsageError(f"{name} expects at least {self.at_least}, got {value}. {self.advice}".strip())
        if self.above is not None and not self.above < value < math.inf:
            expected = f"a number of {self.unit} above {self.above:g}"
            raise UsageError(f"{name} expects {expected}, got {value:g}. {self.advice}".strip())


def flags_of(config_class: type) -> Iterator[tuple[str, "dataclasses.Field[Any]", Flag]]:
    """Yields the flags of a dataclass: (name of the flag, field, how the flag sets it)."""
    for entry in dataclasses.fields(config_class):
        its_flag: Flag | None = entry.metadata.get(_METADATA_KEY)
        if its_flag is None:
            continue
        yield its_flag.name or f"--lancet-{entry.name.replace('_', '-')}", entry, its_flag


class CheckedFlags:
    """Base of the dataclasses of flags: refuses a value outside the range of its flag."""

    def __post_init__(self) -> None:
        for name, entry, its_flag in flags_of(type(self)):
            value = getattr(self, entry.name)
            if value is not None:
                its_flag.check(name, value)


def flag(default: Any, **settings: Any) -> Any:
    """A field that a flag sets.

    Args:
        settings: of :class:`Flag`.
    """
    return field(default=default, metadata={_METADATA_KEY: Flag(**settings)})


def words(kind: type[StrEnum] | type[Named], none_word: str | None = None) -> dict[str, Any]:
    """Settings of a flag that takes a member of an enumeration, or ``none_word``, which leaves the field at None.

    Args:
        kind: the enumeration, or a kind of objects that are known by name.
    """
    members = kind.known() if issubclass(kind, Named) else {member.value: member for member in kind}
    choices = tuple(members) if none_word is None else (none_word, *members)
    return {"choices": choices, "none_word": none_word, "read": members.__getitem__}


def word_or_path(kind: type[StrEnum]) -> Callable[[str], StrEnum | Path]:
    """Reads a member of an enumeration, or else a path."""
    return lambda text: kind(text) if text in list(kind) else Path(text)
