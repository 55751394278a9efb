"""Checkpoints as files: which one is the latest, which are complete, and how a new one becomes the latest.

A checkpoint is written into a folder named ``incomplete_iter_0000008``. When all ranks have written and synced their
parts, the folder is renamed to ``iter_0000008``, and only then the tracker file names it. So every folder ``iter_...``
is complete, whenever a run is killed, unless it is damaged later or was written by stock Megatron.
"""

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megatron_lancet.errors import UsageError
from megatron_lancet.training.checkpoint.index import INDEX, DamagedIndex, read_index

TRACKER = "latest_checkpointed_iteration.txt"
INCOMPLETE = "incomplete_"
RELEASE = "release"
_CONFIG = "metadata.json"
_FORMATS_WITHOUT_CONFIG = ("torch_dcp", "fsdp_dtensor")
_MAX_LISTED = 4
_MAX_DIGITS = 18
"""Digits of a step that are accepted: a damaged number must not become a name that no file system takes."""


def name_of(step: int | str) -> str:
    """The folder name of a checkpoint: ``iter_0000008`` or ``release``."""
    return RELEASE if step == RELEASE else f"iter_{int(step):07d}"


def tracked_step(folder: Path, ckpt_format: str) -> int | str | None:
    """The step that the tracker file names, or ``release``; None without such a file.

    Raises:
        UsageError: the file names neither.
    """
    try:
        return read_tracker(folder)
    except ValueError as error:
        raise UsageError(f"{error}. {_advice(folder, None, ckpt_format)}") from None


def read_tracker(folder: Path) -> int | str | None:
    """Like :func:`tracked_step`, for callers with advice of their own.

    Raises:
        ValueError: the file names neither a step nor ``release``.
    """
    tracker = folder / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace").strip()
    if text == RELEASE:
        return RELEASE
    if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS:
        return int(text)
    raise ValueError(f"{tracker} must hold the number of a step; it holds {repr(text[:40]) if text else 'nothing'}")


def find_damage(checkpoint: Path, ckpt_format: str) -> str | None:
    """Describe what a checkpoint lacks, by the presence and the sizes of its files; None if it is complete.

    Args:
        ckpt_format: Megatron's ``--ckpt-format``, for a folder that does not name its own.
    """
    missing = find_missing_files(checkpoint, ckpt_format)
    if missing is not None or not (checkpoint / INDEX).is_file():
        return missing
    try:
        return read_index(checkpoint).missing_part(checkpoint)
    except (OSError, DamagedIndex):
        return f"{INDEX} is damaged"


def find_missing_files(checkpoint: Path, ckpt_format: str) -> str | None:
    """Like :func:`find_damage`, without the parts that each rank wrote: reads few files, whatever the world size."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    legacy = sorted(checkpoint.glob("mp_rank_0*"))
    for part in legacy:  # one per rank in the format ``torch``: a zip file, whose end is its index
        file = part / "model_optim_rng.pt"
        if not zipfile.is_zipfile(file):
            return f"{part.name}/{file.name} is {'truncated' if file.is_file() else 'missing'}"
    if legacy:
        return None
    if not (checkpoint / _CONFIG).is_file():
        if ckpt_format in _FORMATS_WITHOUT_CONFIG and (checkpoint / INDEX).is_file():
            return None
        return f"{_CONFIG} is missing, which is written when all else is"
    try:
        config = json.loads((checkpoint / _CONFIG).read_text())
    except ValueError:
        config = None
    if not isinstance(config, dict) or "sharded_backend" not in config:
        return f"{_CONFIG} is damaged"
    return None if (checkpoint / INDEX).is_file() else f"{INDEX} is missing"


def complete_steps(folder: Path, ckpt_format: str) -> list[int]:
    """Steps of the complete checkpoints in a folder, oldest first."""
    steps = {path: path.name.removeprefix("iter_") for path in folder.glob("iter_*")}
    return sorted(
        int(text) for path, text in steps.items() if text.isdigit() and find_damage(path, ckpt_format) is None
    )


def check_loadable(
    folder: Path, ckpt_step: int | None, ckpt_format: str, find: Callable[[Path, str], str | None] = find_damage
) -> None:
    """Refuse to resume from an incomplete checkpoint, or to start anew in a folder whose checkpoints are untracked.

    Args:
        ckpt_step: the user's ``--ckpt-step``; None for the step that the tracker file names.
        find: :func:`find_damage`, or :func:`find_missing_files` where every rank looks.

    Raises:
        UsageError: names the damage and the checkpoints that are complete. An empty or missing folder is no error:
            the run starts from the beginning, as in stock.
    """
    step = ckpt_step or tracked_step(folder, ckpt_format)
    if step is None:
        if complete_steps(folder, ckpt_format):
            raise UsageError(
                f"{folder} has checkpoints, but no file {TRACKER} says which one is the latest. "
                f"{_advice(folder, None, ckpt_format)}"
            )
        return
    checkpoint = folder / name_of(step)
    damage = find(checkpoint, ckpt_format)
    if damage is not None:
        source = "--ckpt-step" if ckpt_step else TRACKER
        raise UsageError(
            f"the checkpoint {checkpoint}, named by {source}, can't be loaded: {damage}. "
            f"{_advice(folder, step, ckpt_format)}"
        )


def _advice(folder: Path, unfit: int | str | None, ckpt_format: str) -> str:
    """Names the checkpoints that can be used instead of the ``unfit`` one, and how."""
    steps = [step for step in complete_steps(folder, ckpt_format) if step != unfit]
    if not steps:
        return (
            f"No other checkpoint in {folder} is complete. Pass another --load; an empty folder there starts from "
            "the beginning."
        )
    before = [step for step in steps if not isinstance(unfit, int) or step < unfit]
    best = (before or steps)[-1]
    listed = ", ".join(map(str, steps[-_MAX_LISTED:]))
    return (
        f"Complete there: step{'s' if len(steps) > 1 else ''} {listed}. To go on from step {best} pass "
        f"--ckpt-step {best}, or write {best} into {folder / TRACKER}. Nothing was changed."
    )


def num_bytes_of(checkpoint: Path) -> int:
    """Bytes that the files of a checkpoint take."""
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def remove_leftover(folder: Path, step: int | str) -> None:
    """Remove what an interrupted save of the same step has left behind."""
    shutil.rmtree(folder / f"{INCOMPLETE}{name_of(step)}", ignore_errors=True)


def publish(folder: Path, step: int | str) -> None:
    """Give a complete checkpoint its final name. An older checkpoint of that name, also a complete one, is replaced."""
    new, final = folder / f"{INCOMPLETE}{name_of(step)}", folder / name_of(step)
    if not new.is_dir():
        return
    replaced = folder / f"{INCOMPLETE}{name_of(step)}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    if final.is_symlink():
        final.unlink()
    elif final.exists():
        final.rename(replaced)
    new.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def writing_tracker(tracker: Path) -> Iterator[IO[str]]:
    """Yield a file for the step of a complete checkpoint; then publish that checkpoint and replace the tracker.

    If the body fails, or the disk is full, the old tracker stays.
    """
    temporary = tracker.with_name(f".{tracker.name}.tmp")
    try:
        with temporary.open("w") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(tracker.parent, temporary.read_text().strip())
        temporary.replace(tracker)
    finally:
        temporary.unlink(missing_ok=True)
    parent = os.open(tracker.parent, os.O_RDONLY)
    try:
        os.fsync(parent)  # the names survive a power cut
    finally:
        os.close(parent)
