"""The training from whose checkpoint all variants of a case start.

Routing is uneven in the first steps of a training, and ranks then wait for each other. ``auto`` is measured a hundred
steps later than the others, so without a common past its steps would be shorter for that alone.
"""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.demo.folder import Folder
from benchmarks.demo.job import Job
from benchmarks.demo.links.link import FREE_BPS, Link
from benchmarks.demo.training_log.training_process import say

START_STEPS = 150
"""Steps of one micro-batch; the variants go on with the next one."""
_LATEST = "latest_checkpointed_iteration.txt"
"""Megatron writes it last."""


def checkpoint(folder: Folder, flags: Sequence[str], options: Sequence[str], link: Link, logs: Path) -> Path:
    """Trains stock without a cap on the link, unless an earlier run did; returns the checkpoint's folder.

    Args:
        flags: of Megatron for one micro-batch, ending after :data:`START_STEPS`.
        options: of the ranks.

    Raises:
        UsageError: the training failed.
    """
    key = hashlib.sha256(repr((*flags, *options, START_STEPS)).encode()).hexdigest()[:12]
    path = folder.root / "starts" / key
    if (path / _LATEST).is_file():
        say(f"      starts from step {START_STEPS} of an earlier run")
        return path
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    say(f"      {START_STEPS} steps of stock, from which all variants start")
    link.set_rate(FREE_BPS)
    save = ["--save", str(path), "--save-interval", str(START_STEPS)]
    with Job("start", link, [*flags, *save], logs / f"start-{key}.log", options=options) as job:
        job.wait_until_ready()
        job.run(range(1, START_STEPS + 1), lambda number, ranks: None)
        job.finish()
    return path


def resumed(path: Path) -> list[str]:
    """Flags of a training that starts from the checkpoint: its schedule of learning rates has another length."""
    return ["--load", str(path), "--exit-on-missing-checkpoint", "--override-opt_param-scheduler"]
