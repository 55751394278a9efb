"""A feature is its folder and its line of the registry: without both, all else imports, type-checks and trains.

mypy reads what a file imports and nothing else. No file imports a feature but its own (``tests/unit/test_imports.py``),
so what type-checks without all features at once does so without each of them: one run of mypy in place of a dozen.
"""

import json
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_lancet import registry
from tests.features import deleted
from tests.ranks.launch import REPO

PACKAGE = REPO / "megatron_lancet"
LINES = re.findall(r'"(megatron_lancet\.[\w.]+):\w+"', Path(registry.__file__).read_text())
FEATURES = sorted({f"features/{line.split('.')[2]}" for line in LINES if line.startswith("megatron_lancet.features.")})
WITHOUT = [*((feature,) for feature in FEATURES), ("lab",), ("lab", "testkit")]
"""Folders that are deleted together: the lab's modelled step runs on the test kit."""
ALL = (*FEATURES, "lab", "testkit")


def name_of(folders: tuple[str, ...]) -> str:
    return "-".join(folder.replace("/", "-") for folder in folders)


def copy_without(folders: tuple[str, ...], place: Path) -> Path:
    """Copies the package, with its compiled files, without some folders and without their lines of the registry."""
    shutil.copytree(PACKAGE, place / "megatron_lancet")
    file = place / "megatron_lancet/registry.py"
    for folder in folders:
        shutil.rmtree(place / "megatron_lancet" / folder)
        dotted = f'"megatron_lancet.{folder.replace("/", ".")}.'
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if dotted not in line))
    return place


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    root = tmp_path_factory.mktemp("copies")
    return {name_of(folders): copy_without(folders, root / name_of(folders)) for folders in WITHOUT}


@pytest.fixture(scope="module")
def trained(copies, token_data):
    """What went wrong in each copy; an empty text if nothing did."""
    (root,) = {copy.parent for copy in copies.values()}
    cases = [copy.name for copy in copies.values()]
    command = [sys.executable, deleted.__file__, root, token_data, *cases]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, cwd=root)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one["case"]: one["error"] for one in found} | {"stderr": done.stderr[-3000:]}


def test_each_feature_has_a_folder_and_a_line():
    assert {f"features/{path.name}" for path in PACKAGE.glob("features/*/")} - {"features/__pycache__"} == set(FEATURES)


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("copy", map(name_of, WITHOUT))
def test_rest_imports_and_trains_without(copy, trained):
    assert trained[copy] == "", trained["stderr"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rest_type_checks_without_all_of_them(tmp_path):
    """With mypy's cache of the repository, where there is one: files that stay are not checked again."""
    copy_without(ALL, tmp_path)
    with suppress(FileNotFoundError):
        shutil.copytree(REPO / ".mypy_cache", tmp_path / ".mypy_cache")
    command = [sys.executable, "-m", "mypy", "--config-file", str(REPO / "pyproject.toml"), "megatron_lancet"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
