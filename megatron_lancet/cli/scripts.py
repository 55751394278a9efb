"""Entry point of ``lancet``: finds the sub-command and runs its tool."""

import argparse
import difflib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_lancet import __version__
from megatron_lancet.cli.commands import COMMANDS, Command, help_text
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.patching import replaced

_PACKAGE = "megatron_lancet.tools"
"""Package that holds the files of ``tools`` in an installation; a checkout has their folder instead."""
_CHECKOUT = Path(__file__).resolve().parents[2] / "tools"


def main() -> None:
    """Runs ``lancet`` with the command line of this process; so does ``python -m megatron_lancet``."""
    run_command(lambda: _run(sys.argv[1:]))


def _run(words: Sequence[str]) -> None:
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(help_text() + "\n")
    elif words[0] == "--version":
        sys.stdout.write(f"megatron-lancet {__version__}\n")
    elif (command := _command(words)) is not None:
        sys.argv = [f"lancet {command.words}", *words[len(command.words.split()) :]]
        _run_tool(command)
    else:
        sys.stdout.write(help_text(words[0]) + "\n")


def _command(words: Sequence[str]) -> Command | None:
    """Returns the command that the words begin with; None if the help of its group is asked for.

    Raises:
        UsageError: there is no such command.
    """
    for length in (1, 2):
        command = COMMANDS.get(" ".join(words[:length]))
        if command is not None:
            return command
    group = [name for name in COMMANDS if name.split()[0] == words[0]]
    if group and words[1:2] in ([], ["-h"], ["--help"]):
        return None
    tried = " ".join(words[: 2 if group and len(words) > 1 else 1])
    close = difflib.get_close_matches(tried, [*COMMANDS, *(name.split()[0] for name in COMMANDS)], n=1)
    expected = ", ".join(group or dict.fromkeys(name.split()[0] for name in COMMANDS))
    meant = f" Did you mean lancet {close[0]}?" if close else ""
    raise UsageError(f"there is no command {tried!r}; expected {expected}.{meant} lancet --help lists all.")


def _run_tool(command: Command) -> None:
    """Runs the file of a tool as main program; runpy would put the file's path where argparse takes the name from."""
    package = importlib.util.find_spec(_PACKAGE)
    locations = package.submodule_search_locations if package is not None else None
    folder = Path(next(iter(locations))) if locations else _CHECKOUT  # a checkout: installed with pip install -e
    spec = importlib.util.spec_from_file_location("__main__", folder / f"{command.tool}.py")
    assert spec is not None
    assert spec.loader is not None
    with replaced(argparse.ArgumentParser, "error", _refuse):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Fails in one line, where argparse prints all flags first."""
    raise UsageError(f"{message}. {parser.prog} --help explains the arguments.")
