"""The versions of torch that are tested have one home, the Makefile; what else names a version agrees."""

import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_lancet.training.megatron.versions import REQUIRED

REPOSITORY = Path(__file__).parents[4]


def only(pattern: str, file: str) -> str:
    (found,) = re.findall(pattern, (REPOSITORY / file).read_text(), re.MULTILINE)
    return found


OLDEST = Version(only(r"^TORCH_OLDEST := (\S+)$", "Makefile"))
NEWEST = Version(only(r"^TORCH_NEWEST := (\S+)$", "Makefile"))
PINNED = Version(only(r"^torch==(\S+)$", "constraints.txt"))


def test_oldest_tested_torch_is_the_first_that_setup_takes():
    bound = only(r'"torch(>=[^"]+)"', "setup.py")
    assert Version(bound.removeprefix(">=")) == OLDEST
    assert REQUIRED["torch"] == SpecifierSet(bound)


def test_pinned_torch_lies_between_the_oldest_and_the_newest():
    assert OLDEST < PINNED < NEWEST


@pytest.mark.parametrize("document", ["README.md", "docs/gpus.md"])
def test_documents_name_the_tested_versions(document):
    text = " ".join((REPOSITORY / document).read_text().split())
    assert f"{OLDEST}, {PINNED} and {NEWEST}" in text


def test_ci_runs_the_oldest_and_the_newest():
    arguments = only(r"^make test-torch(.*)$", ".ci/run").partition("#")[0]
    assert not arguments.strip(), "a VERSION takes the place of both"
