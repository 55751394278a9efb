"""Every tool shows its help at once."""

import os
import subprocess
import sys

import pytest

from tests.ranks.launch import REPO

TOOLS = sorted((REPO / "tools").glob("*.py"))
WITHOUT_TORCH = (
    "import runpy, sys; sys.modules['torch'] = None; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_every_tool_shows_its_help_without_torch(tool):
    """Its import takes seconds, and a user who asks for help waits."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tool), "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # a help text with a lone % raises
    assert done.stdout.startswith(f"usage: {tool.name}")
