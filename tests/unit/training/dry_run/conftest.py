import shlex
import sys

import pytest

from megatron_lancet.lab.dry_run.report import Findings
from megatron_lancet.lab.dry_run.run import examine
from tests.unit.training.dry_run.lists import LISTS


@pytest.fixture
def dry_run(monkeypatch):
    """Findings of a dry run of a list, with other arguments behind it, or without some flags of its own."""

    def run(name: str, *more: object, without: tuple[str, ...] = ()) -> Findings:
        words = [word for word in shlex.split((LISTS / f"{name}.args").read_text()) if word not in without]
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py", "--lancet-dry-run", *words, *map(str, more)])
        return examine()

    return run


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
