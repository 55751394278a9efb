"""Benchmarks as programs."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[3]
TINY = ["--layers", "1", "--hidden", "64", "--seq-length", "32", "--repeats", "2", "--rate", "100"]
"""A benchmark on the shaped network, small."""


def run_bench(module: str, *words: object, launcher: Sequence[str] = (), **variables: str) -> tuple[str, int]:
    """Runs ``benchmarks.MODULE`` to its good end; returns its output and the number of its process.

    Args:
        launcher: the interpreter's words in front of the module.
        variables: of the environment, next to this process's.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "RANK"}
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, f"benchmarks.{module}", *map(str, words)],
        cwd=REPO,
        env={**inherited, "PYTHONPATH": str(REPO), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output, process.pid


def run_on_network(module: str, folder: Path, *words: object) -> tuple[str, dict[str, Any], str]:
    """Runs a benchmark on the shaped network, which leaves no namespace; returns its output, its result and tables."""
    output, pid = run_bench(module, *TINY, *words, "--output", folder / "run")
    assert not any(name.startswith(f"lancet-{pid}-") for name in namespaces())
    return output, json.loads((folder / "run.json").read_text()), (folder / "run.md").read_text()


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def processes_of(words: str) -> list[int]:
    """Running processes that have these words in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # ended in between
            continue
        if words in line:
            found.append(int(folder.name))
    return found
