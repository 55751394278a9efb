"""Runs the commands of ``ssh`` and ``pdsh`` here, as a host would run them."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron_lancet.lab.launch.isolated import grammars
from megatron_lancet.lab.launch.isolated.options import split

FILES = "files"
"""Name of the folder, beside the stand-ins, of files that these read."""
ENVIRONMENT = "environment.json"
"""Name of the file with the user's own variables: a host does not get the exports of the script."""


def ssh(words: Sequence[str], kept: Sequence[str], stand_ins: Path) -> list[str]:
    """Returns the command of ``ssh OPTIONS HOST COMMAND``, and sets the environment of the host.

    Args:
        kept: variables of the stand-ins.
        stand_ins: their folder.
    """
    options, rest = split(words, grammars.SSH, lambda _: False)
    more, command = split(rest[1:], grammars.SSH, lambda _: False)  # ssh takes options behind the host, too
    if not rest or "N" in {*options, *more}:
        return []
    return _on_host(command, kept, stand_ins)


def pdsh(words: Sequence[str], kept: Sequence[str], stand_ins: Path) -> list[str]:
    """Returns the command of ``pdsh -w HOSTS COMMAND`` for the first host; see :func:`ssh`."""
    _, command = split(words, grammars.PDSH, lambda _: False)
    own = [word.replace("%n", "0").replace("%h", "localhost") for word in command]
    return _on_host(own, kept, stand_ins) if own else []


def _on_host(command: Sequence[str], kept: Sequence[str], stand_ins: Path) -> list[str]:
    user: dict[str, str] = {}
    with suppress(OSError, ValueError):
        user = json.loads((stand_ins / FILES / ENVIRONMENT).read_text())
    user |= {name: os.environ[name] for name in kept if name in os.environ}
    os.environ.clear()
    os.environ.update(user)
    return ["bash", "-c", " ".join(command)] if command else ["bash"]
