"""The checkpoints of a folder: which one is the latest, and which are complete."""

import argparse
import json
import zipfile
from pathlib import Path

from megatron_lancet.checkpoint.index import INDEX, DamagedIndex, read_index
from megatron_lancet.errors import UsageError

TRACKER = "latest_checkpointed_iteration.txt"
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
        raise UsageError(f"{error}. {advice(folder, None, ckpt_format)}") from None


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


def load_folder(args: argparse.Namespace) -> Path | None:
    """The folder of persistent checkpoints that Megatron will load from; None if there is none, or no plain one.

    Args:
        args: Megatron's arguments. It takes ``--pretrained-checkpoint`` where ``--load`` has no tracker file.

    Raises:
        UsageError: a tracker file is damaged.
    """
    folders = [Path(folder) for folder in (args.load, args.pretrained_checkpoint) if folder and "://" not in folder]
    if args.pretrained_checkpoint is not None:
        folders = [folder for folder in folders if tracked_step(folder, args.ckpt_format) is not None]
    return folders[0] if folders else None


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


def advice(folder: Path, unfit: int | str | None, ckpt_format: str) -> str:
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
