"""The script that says what other versions of Megatron lack, in Megatron as it is and with a folder less."""

from pathlib import Path

from megatron.core import models
from megatron.core.distributed import DistributedDataParallel

from docs.megatron_versions import missing_here, missing_in, table

INSTALLED = Path(models.__file__).parents[3]


def links(folder, into, but):
    """Links all entries of a folder of Megatron but some."""
    into.mkdir(parents=True)
    for entry in folder.iterdir():
        if entry.name not in but:
            (into / entry.name).symlink_to(entry)


def test_installed_megatron_lacks_nothing_until_it_does(monkeypatch):
    assert missing_here() == []
    monkeypatch.delattr(DistributedDataParallel, "_make_backward_post_hook")
    assert missing_here() == ["DistributedDataParallel._make_backward_post_hook"]


def test_modules_that_are_missing_are_named_once(tmp_path):
    megatron = INSTALLED / "megatron"
    links(megatron, tmp_path / "megatron", but=["core"])
    links(megatron / "core", tmp_path / "megatron/core", but=["fusions"])
    links(megatron / "core/fusions", tmp_path / "megatron/core/fusions", but=["fused_bias_swiglu.py", "__pycache__"])
    assert missing_in(tmp_path) == ["core.fusions.fused_bias_swiglu"]


def test_versions_are_rows():
    rows = table({"0.1": ["a.b", "a line in a.c"], "0.2": []}).splitlines()[2:]
    assert rows == ["| 0.1 | `a.b`, a line in a.c |", "| 0.2 | nothing |"]
