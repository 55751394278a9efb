"""Entry point of the installed scripts: ``lancet-make-plan`` runs ``tools/make_plan.py``, and so on."""

import importlib.util
import runpy
import sys
from pathlib import Path

from megatron_lancet.errors import UsageError, run_command

_PREFIX = "lancet-"
_PACKAGE = "megatron_lancet.tools"
"""Package that holds the files of ``tools`` in an installation; a checkout has their folder instead."""
_CHECKOUT = Path(__file__).resolve().parents[2] / "tools"


def main() -> None:
    """Runs the tool with this script's name as main program; ``setup.py`` installs one script for each tool."""
    run_command(_run_tool)


def _run_tool() -> None:
    script = Path(sys.argv[0]).stem
    name = script.removeprefix(_PREFIX).replace("-", "_")
    module, file = f"{_PACKAGE}.{name}", _CHECKOUT / f"{name}.py"
    if importlib.util.find_spec(_PACKAGE) is None and file.is_file():  # installed with pip install -e
        runpy.run_path(str(file), run_name="__main__")
        return
    if importlib.util.find_spec(_PACKAGE) is None or importlib.util.find_spec(module) is None:
        raise UsageError(
            f"there is no tool {script}; expected the name of an installed one, such as {_PREFIX}make-plan"
        )
    runpy.run_module(module, run_name="__main__")
