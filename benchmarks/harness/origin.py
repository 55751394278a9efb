"""Where a result comes from: the fields that every result file of a benchmark begins with. No torch."""

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.harness import machine_speed

_REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("torch", "megatron-core")
_SETTINGS = ("MALLOC_", "OMP_", "MKL_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Beginnings of the environment variables that change an allocator's or a compute library's speed."""


def origin(
    module: str,
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    packages: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns command, date, commit, machine, its speed, versions and settings at the start of a benchmark.

    Before writing it, call :func:`finished`, which measures the machine's speed again.

    Args:
        module: that ``python -m`` ran.
        arguments: of its command line; None for this process's.
        environment: of the processes that were measured; None for this process's.
        packages: whose versions are wanted in addition to torch and Megatron.
    """
    commit, is_dirty = commit_of_checkout()
    given = os.environ if environment is None else environment
    return {
        "command": shlex.join(["python", "-m", module, *(sys.argv[1:] if arguments is None else arguments)]),
        "date": time.strftime("%Y-%m-%d"),
        "time": time.strftime("%H:%M:%S"),
        "commit": commit,
        "is_dirty": is_dirty,
        "machine": _machine(),
        "machine_speed": asdict(machine_speed.measured()),
        "versions": versions_of((*PACKAGES, *packages)),
        "settings": {name: value for name, value in sorted(given.items()) if name.startswith(_SETTINGS)},
    }


def finished(found: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the machine's speed at the end of the benchmark to the result of :func:`origin`, for the result file."""
    before = machine_speed.Speed(**found["machine_speed"])
    return {**found, "machine_speed": machine_speed.compared(before, machine_speed.measured())}


def described(found: Mapping[str, Any]) -> str:
    """Describes the result of :func:`finished` in a line of markdown, without the machine's speed.

    The first result files have only the version of torch, and neither commit nor settings.
    """
    machine, versions = found["machine"], found["versions"] if "versions" in found else {"torch": found["torch"]}
    settings = [f"`{name}={value}`" for name, value in found.get("settings", {}).items()]
    parts = [
        f"`{found['command']}`",
        found["date"],
        _source(found),
        f"{machine['cores']} cores of {machine['processor']}",
        *(f"{name} {number}" for name, number in versions.items()),
        *settings,
    ]
    return ", ".join(parts)


def first_lines(found: Mapping[str, Any]) -> str:
    """Adds a paragraph with the machine's speed, which older results lack."""
    speed = found.get("machine_speed")
    return described(found) + ("" if speed is None else f"\n\n{machine_speed.described(speed)}")


def _source(found: Mapping[str, Any]) -> str:
    if "commit" not in found:
        return "no commit recorded"
    if found["commit"] is None:
        return "outside a repository"
    return f"commit {found['commit'][:12]}{' with uncommitted changes' if found.get('is_dirty') else ''}"


def commit_of_checkout() -> tuple[str | None, bool | None]:
    """The commit, and whether tracked files differ from it; None where git or the repository is missing."""
    # With sudo the repository belongs to another user, which git refuses without this setting.
    git = ["git", "-C", str(_REPOSITORY), "-c", f"safe.directory={_REPOSITORY}"]
    try:
        commit = _output([*git, "rev-parse", "HEAD"])
        return commit, bool(_output([*git, "status", "--porcelain", "--untracked-files=no"]))
    except (OSError, subprocess.CalledProcessError):
        return None, None


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def versions_of(packages: Sequence[str]) -> dict[str, str | None]:
    """Versions by package; None where one is not installed."""
    return {package: _version(package) for package in packages}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return {
        "processor": ", ".join(sorted(models)) or platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
