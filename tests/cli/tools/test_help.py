"""Every command shows its help at once."""

import os
import subprocess
import sys

import pytest

from megatron_lancet.cli.commands import COMMANDS
from tests.ranks.launch import REPO

WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; sys.argv[0] = 'lancet'; "
    "from megatron_lancet.cli.scripts import main; main()"
)


@pytest.mark.parametrize("words", ["", *COMMANDS])
def test_every_command_shows_its_help_without_torch(words):
    """Its import takes seconds, and a user who asks for help waits."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", WITHOUT_TORCH, *words.split(), "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # a help text with a lone % raises
    assert done.stdout.startswith(f"usage: {f'lancet {words}'.strip()} ")
