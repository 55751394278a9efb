"""The training from whose checkpoint all variants of a case start.

Routing is uneven in the first steps of a training, and ranks then wait for each other. ``auto`` is measured about a
hundred steps later than the others: untrained variants would wait longer for that reason alone.
"""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.demo.job import Job
from benchmarks.demo.training_log.training_process import say

START_STEPS = 150
"""Steps of one micro-batch; the variants go on with the next one."""
_LATEST = "latest_checkpointed_iteration.txt"
"""Megatron writes it last."""


def checkpoint(job: Callable[..., Job], flags: Sequence[str], data: str, folder: Path, logs: Path) -> Path:
    """Trains stock, unless an earlier run did; returns the checkpoint's folder.

    Args:
        job: starts the ranks; takes their flags and their log.
        flags: of Megatron, with one micro-batch a step and :data:`START_STEPS` steps.
        data: names the content of the data set; another content needs another checkpoint.
        folder: of checkpoints.

    Raises:
        UsageError: the training failed.
    """
    key = hashlib.sha256(repr((*flags, data)).encode()).hexdigest()[:12]
    path = folder / key
    if (path / _LATEST).is_file():
        say(f"      starts from step {START_STEPS} of an earlier run")
        return path
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    say(f"      {START_STEPS} steps of stock, from which all variants start")
    save = ["--save", str(path), "--save-interval", str(START_STEPS)]
    with job(flags=[*flags, *save], log=logs / f"start-{key}.log") as ranks:
        ranks.wait_until_ready()
        ranks.run(range(1, START_STEPS + 1), lambda number, steps: None)
        ranks.finish()
    return path


def resumed(path: Path) -> list[str]:
    """Flags of a training that starts from the checkpoint: its schedule of learning rates has another length."""
    return ["--load", str(path), "--exit-on-missing-checkpoint", "--override-opt_param-scheduler"]
