"""Says what other versions of Megatron-Core lack of the seams: ``python docs/megatron_versions.py VERSION=FOLDER ...``.

A folder has ``megatron/`` in it, as an unpacked wheel and a checkout do. Each is imported in a process of its own, with
the installed packages behind it. Modules and names that it lacks get stand-ins, so that one run finds them all. The
table stands in ``docs/design/megatron.md``. A seam that is there may still behave in another way.
"""

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_REPOSITORY = Path(__file__).parents[1]


def table(missing: Mapping[str, Sequence[str]]) -> str:
    """Returns a Markdown table.

    Args:
        missing: what each version lacks.
    """
    lines = ["| megatron-core | lacks |", "|---|---|"]
    for version, its in missing.items():
        names = ", ".join(name if " " in name else f"`{name}`" for name in its)
        lines.append(f"| {version} | {names or 'nothing'} |")
    return "\n".join(lines)


def missing_in(folder: Path) -> list[str]:
    """Names what the Megatron in a folder lacks: modules, names, and then all seams of those that it has."""
    words = [sys.executable, "-W", "ignore", __file__]
    path = os.pathsep.join([str(_REPOSITORY), str(folder)])
    run = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"expected a folder with megatron/core, found {folder}: {run.stderr[-2000:]}")
    found: list[str] = json.loads(run.stdout.splitlines()[-1])
    return found


def missing_here() -> list[str]:
    """Names what the Megatron of this process lacks."""
    missing: dict[str, str] = {}
    while True:
        try:
            found = _missing_seams()
            break
        except ImportError as error:
            if error.name is None or error.name.startswith("megatron_lancet"):
                raise
            _stand_in(error.name, error.name_from)
            missing[error.name_from or error.name] = ".".join(filter(None, (error.name, error.name_from)))
        for name in [name for name in sys.modules if name.startswith("megatron_lancet")]:
            del sys.modules[name]
    # What a name that is missing has is missing, too.
    found = [name for name in found if not any(f"{absent}." in name for absent in missing)]
    names = [*(name for name in missing.values() if name.startswith("megatron.")), *found]
    outer = [name for name in names if not any(name.startswith((f"{one}.", f"{one}(")) for one in names)]
    return [name.removeprefix("megatron.") for name in outer]


def _missing_seams() -> list[str]:
    seams: Any = importlib.import_module("megatron_lancet.training.megatron.seams")
    replaced = importlib.import_module("megatron_lancet.patching").replaced
    found: list[str] = []
    with replaced(seams, "refuse_missing", found.extend), replaced(inspect, "getsource", _source):
        seams.check_seams()
    return found


def _stand_in(module: str, name: str | None) -> None:
    if name is None:
        sys.modules[module] = ModuleType(module)
        sys.modules[module].__path__ = []
    else:
        setattr(sys.modules[module], name, _Absent(name, (), {}))


class _Absent(type):
    """A class in place of a missing name; each of its attributes is one, too."""

    def __getattr__(cls, name: str) -> "_Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})


def _source(of: Any, stock: Callable[[Any], str] = inspect.getsource) -> str:
    try:
        return stock(of)
    except OSError:  # a stand-in has none
        return ""


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(json.dumps(missing_here()))
    else:
        folders = dict(word.split("=", 1) for word in sys.argv[1:])
        print(table({version: missing_in(Path(folder)) for version, folder in folders.items()}))
