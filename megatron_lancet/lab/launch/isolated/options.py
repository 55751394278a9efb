"""Splits a launcher's command line into its options and the command that it starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Options = dict[str, list[str]]
"""Values of each option, by its name without dashes, in order; empty strings for options without a value."""


@dataclass(frozen=True)
class Grammar:
    """Options of a launcher.

    Attributes:
        flags: long options without a value.
        short_flags: letters of short options without a value.
        pairs: options with two values.
        valued: options that have a value even if the next word is a command.
        is_known: whether all other options have a value; if not, the next word decides.
        has_long_words: whether one dash starts a long option too, as ``-np``.
    """

    flags: frozenset[str] = frozenset()
    short_flags: str = ""
    pairs: frozenset[str] = frozenset()
    valued: frozenset[str] = frozenset()
    is_known: bool = True
    has_long_words: bool = False


def split(words: Sequence[str], grammar: Grammar, is_command: Callable[[str], bool]) -> tuple[Options, list[str]]:
    """Splits words into options and the rest, which starts at the first word that is neither an option nor a value.

    Args:
        is_command: whether a word looks like a command; asked where the grammar does not know an option.
    """
    found: Options = {}
    position = 0
    while position < len(words):
        word, following = words[position], list(words[position + 1 :])
        if word == "--":
            return found, following
        if len(word) < 2 or word[0] != "-":
            return found, list(words[position:])
        if word.startswith("--") or grammar.has_long_words:
            name, equals, value = word.lstrip("-").partition("=")
            has_value = not equals and _has_value(name, grammar.flags, grammar, following, is_command)
        else:
            flags = word[1:].rstrip() if set(word[1:]) <= set(grammar.short_flags) else ""
            for letter in flags[:-1]:
                found.setdefault(letter, []).append("")
            name, value = (flags[-1], "") if flags else _short(word[1:], grammar.short_flags, found)
            has_value = not value and _has_value(name, frozenset(grammar.short_flags), grammar, following, is_command)
        if has_value:
            value = following[0]
        found.setdefault(name, []).append(value.removeprefix("=") if name and len(name) == 1 else value)
        position += 1 + (2 if name in grammar.pairs else int(has_value))
    return found, []


def _short(letters: str, short_flags: str, found: Options) -> tuple[str, str]:
    """Returns the first letter that takes a value, and the value that is attached to it."""
    while letters[0] in short_flags and len(letters) > 1:
        found.setdefault(letters[0], []).append("")
        letters = letters[1:]
    return letters[0], letters[1:]


def _has_value(
    name: str, flags: frozenset[str], grammar: Grammar, following: list[str], is_command: Callable[[str], bool]
) -> bool:
    """Returns whether the next word is the option's value."""
    if name in flags or not following:
        return False
    is_value = grammar.is_known or name in grammar.valued or not is_command(following[0])
    return is_value and not following[0].startswith("-")
