"""Megatron's parser, and checkpoints as torch writes them."""

import argparse
import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_lancet.checkpoint.files import TRACKER
from megatron_lancet.patching import around


@pytest.fixture(autouse=True, scope="session")
def docstrings_read_once():
    """Megatron's parser parses the sources of its classes each time it is made: most of what a command line takes."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    known: dict[type, dict[str, str]] = {}

    def read(stock: Callable[[Any, type], dict[str, str]], factory: Any, source: type) -> dict[str, str]:
        if source not in known:
            known[source] = stock(factory, source)
        return known[source]

    with around(ArgumentGroupFactory, "_get_field_docstrings", read):
        yield


@pytest.fixture(scope="module")
def parser():
    """Megatron's own, with none of our flags."""
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.fixture(scope="module")
def one_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "checkpoint"
    dcp.save({"weight": torch.arange(1000.0), "step": 3}, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return folder


@pytest.fixture
def folder(one_checkpoint, tmp_path):
    """Checkpoints of steps 2, 4, 6; the last one is the latest."""
    for step in (2, 4, 6):
        shutil.copytree(one_checkpoint, tmp_path / f"iter_000000{step}")
    (tmp_path / TRACKER).write_text("6")
    return tmp_path
