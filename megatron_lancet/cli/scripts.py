"""What ``lancet-make-plan`` and its like start, where the package is installed: ``tools/make_plan.py`` and its like."""

import importlib.util
import runpy
import sys
from pathlib import Path

from megatron_lancet.errors import UsageError, run_command

_PREFIX = "lancet-"
_PACKAGE = "megatron_lancet.tools"
"""Where an installation has the files of ``tools``; a checkout does not."""


def main() -> None:
    """Run the tool that this script is named after, as a main program; ``setup.py`` installs one script for each."""
    run_command(_run_tool)


def _run_tool() -> None:
    script = Path(sys.argv[0]).stem
    module = f"{_PACKAGE}.{script.removeprefix(_PREFIX).replace('-', '_')}"
    if importlib.util.find_spec(_PACKAGE) is None or importlib.util.find_spec(module) is None:
        raise UsageError(f"there is no tool {script}; expected the name of an installed one, as {_PREFIX}make-plan")
    runpy.run_module(module, run_name="__main__")
