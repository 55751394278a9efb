"""Runs a script with Transformer Engine on a CPU: ``python -m tests.te_cpu SCRIPT ARGUMENTS``."""

import runpy
import sys

from tests import te_cpu

te_cpu.install()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
