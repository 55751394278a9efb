"""A feature is its folder and its line of the registry: without both, all else imports, type-checks and trains.

mypy reads what a file imports and nothing else. No file imports a feature but its own, also for annotations alone
(``tests/unit/test_imports.py``), so mypy runs at night only, and once: without all features.
"""

import itertools
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
LAB = ("lab", "testkit")
"""The lab's modelled step runs on the test kit, which is not deleted without it."""
PARTS = [*((feature,) for feature in FEATURES), LAB]
NUM_COPIES = 7
LACKS = dict(zip(PARTS, itertools.combinations(range(NUM_COPIES), 3), strict=False))
"""The copies that lack each part: no part's three copies are another's, so each is deleted next to each other one."""
WITHOUT = {
    **{f"copy-{copy}": sum((part for part in PARTS if copy in LACKS[part]), ()) for copy in range(NUM_COPIES)},
    "lab": ("lab",),
}
"""Folders that are deleted together, by the name of a copy of the package."""
ALONE = {part[0].replace("/", "-"): part for part in PARTS}


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


def flaws_of(without: dict[str, tuple[str, ...]], root: Path, data: Path) -> dict[str, str]:
    """What went wrong in each copy; an empty text if nothing did."""
    for name, folders in without.items():
        copy_without(folders, root / name)
    command = [sys.executable, deleted.__file__, root, data, *without]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, cwd=root)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one["case"]: one["error"] for one in found} | {"stderr": done.stderr[-3000:]}


@pytest.fixture(scope="module")
def flaws(tmp_path_factory, token_data):
    return flaws_of(WITHOUT, tmp_path_factory.mktemp("copies"), token_data)


def test_each_feature_has_a_folder_and_a_line():
    assert {f"features/{path.name}" for path in PACKAGE.glob("features/*/")} - {"features/__pycache__"} == set(FEATURES)


def test_each_part_is_deleted_beside_each_other_one():
    lacked = [set(folders) for folders in WITHOUT.values()]
    for gone, kept in itertools.permutations(PARTS, 2):
        assert any({*gone} <= folders and folders.isdisjoint(kept) for folders in lacked), (gone, kept)


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("copy", WITHOUT)
def test_rest_imports_and_trains_without(copy, flaws):
    assert flaws[copy] == "", f"{WITHOUT[copy]}: {flaws['stderr']}"


@pytest.mark.nightly
@pytest.mark.timeout(700)
def test_rest_imports_and_trains_without_one_part_alone(tmp_path, token_data):
    found = flaws_of(ALONE, tmp_path, token_data)
    assert {name: found[name] for name in ALONE} == dict.fromkeys(ALONE, ""), found["stderr"]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_rest_type_checks_without_all_of_them(tmp_path):
    """With mypy's cache of the repository, where there is one: files that stay are not checked again."""
    copy_without((*FEATURES, *LAB), tmp_path)
    with suppress(FileNotFoundError):
        shutil.copytree(REPO / ".mypy_cache", tmp_path / ".mypy_cache")
    command = [sys.executable, "-m", "mypy", "--config-file", str(REPO / "pyproject.toml"), "megatron_lancet"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
