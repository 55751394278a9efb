"""Argument types and checks shared by the tools."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_lancet.errors import UsageError


def positive_int(text: str) -> int:
    """Parses a whole number of at least 1, as ``type=`` of an argparse option."""
    return _whole_number(text, 1)


def count(text: str) -> int:
    """Parses a whole number of at least 0, as ``type=`` of an argparse option."""
    return _whole_number(text, 0)


def _whole_number(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return value


def positive_float(text: str) -> float:
    """Parses a finite number above 0, as ``type=`` of an argparse option."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def require_output_folder(target: Path) -> None:
    """Checks before any work is done that ``target`` can be written.

    Raises:
        UsageError: the folder of ``target`` is missing, is not a folder or is read-only, or ``target``
            is itself a folder.
    """
    folder = target.parent
    if not folder.is_dir():
        raise UsageError(f"output folder {folder} does not exist (for {target.name}); create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"output folder {folder} is not writable (for {target.name})")
    if target.is_dir():
        raise UsageError(f"output {target} is an existing folder, expected a file name")


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the flag by which a launch script runs without isolation."""
    parser.add_argument(
        "--trust-script", action="store_true", help="run the launch script without isolation, with access to all files"
    )


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the launch, behind all flags of a command, and the flag for its script."""
    add_trust_argument(parser)
    parser.add_argument(
        "launch",
        nargs=argparse.REMAINDER,
        metavar="LAUNCH",
        help="a launch script with its arguments, a file of Megatron's flags, or the flags",
    )


def own_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line where the launch begins: at the first word that is none of the tool's flags or values."""
    actions = {option: action for action in parser._actions for option in action.option_strings}
    position = 0
    while position < len(words) and words[position].partition("=")[0] in actions:
        name, equals, _ = words[position].partition("=")
        position += 1 if equals else 1 + _num_values(parser, actions[name], words[position + 1 :])
    return list(words[:position]), list(words[position:])


def _num_values(parser: argparse.ArgumentParser, action: argparse.Action, words: Sequence[str]) -> int:
    """Returns the number of a flag's values in the words after it. A flag of any number takes all words that its type
    parses.
    """
    if action.nargs not in ("+", "*"):
        return 1 if action.nargs is None else int(action.nargs)
    for number, word in enumerate(words):
        try:
            parser._get_value(action, word)
        except argparse.ArgumentError:
            return number
    return len(words)
