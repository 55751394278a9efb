"""Checkpoints as files: which one is the latest, which are complete, and how a new one becomes the latest.

A checkpoint is written into a folder named ``incomplete_iter_0000008``. When all ranks have written and synced their
parts, the folder gets its name, and only then the tracker file names it. So there is no folder ``iter_...`` that is
not complete, whenever a run is killed; unless somebody damages it later, or stock Megatron wrote it.
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
"""Of a step: a damaged number must not become a name that no file system takes."""


def name_of(step: int | str) -> str:
    """Name of the folder of a checkpoint: ``iter_0000008`` or ``release``."""
    return RELEASE if step == RELEASE else f"iter_{int(step):07d}"


def tracked_step(folder: Path, ckpt_format: str) -> int | str | None:
    """What the tracker file names: a step or ``release``; None without such a file.

    Raises:
        UsageError: it names neither.
    """
    try:
        return read_tracker(folder)
    except ValueError as error:
        raise UsageError(f"{error}. {_advice(folder, None, ckpt_format)}") from None


def read_tracker(folder: Path) -> int | str | None:
    """As :func:`tracked_step`, where a caller has advice of its own.

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
    shown = repr(text[:40]) if text else "nothing"
    raise ValueError(f"{tracker} must hold the number of a step; it holds {shown}")


def flaw_of(checkpoint: Path, ckpt_format: str) -> str | None:
    """What a checkpoint lacks, None if it is complete. Looks at the presence and the sizes of its files.

    Args:
        ckpt_format: Megatron's ``--ckpt-format``, for a folder that does not say which one it has.
    """
    shallow = outline_flaw_of(checkpoint, ckpt_format)
    if shallow is not None or not (checkpoint / INDEX).is_file():
        return shallow
    try:
        return read_index(checkpoint).missing_part(checkpoint)
    except (OSError, DamagedIndex):
        return f"{INDEX} is damaged"


def outline_flaw_of(checkpoint: Path, ckpt_format: str) -> str | None:
    """As :func:`flaw_of`, without looking at the parts that each rank wrote: few files, whatever the world size."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    legacy = sorted(checkpoint.glob("mp_rank_0*"))
    if legacy:
        return next((flaw for part in legacy if (flaw := _legacy_flaw(part)) is not None), None)
    if not (checkpoint / _CONFIG).is_file():
        if ckpt_format in _FORMATS_WITHOUT_CONFIG and (checkpoint / INDEX).is_file():
            return None
        return f"{_CONFIG} is missing, which is written when all else is"
    try:
        config = json.loads((checkpoint / _CONFIG).read_text())
    except ValueError:
        return f"{_CONFIG} is damaged"
    if not isinstance(config, dict) or "sharded_backend" not in config:
        return f"{_CONFIG} is damaged"
    return None if (checkpoint / INDEX).is_file() else f"{INDEX} is missing"


def _legacy_flaw(part: Path) -> str | None:
    """Of ``mp_rank_...``, the part of a rank in the format ``torch``: a zip file, whose end is its index."""
    file = part / "model_optim_rng.pt"
    shown = f"{part.name}/{file.name}"
    if not file.is_file():
        return f"{shown} is missing"
    return None if zipfile.is_zipfile(file) else f"{shown} is cut"


def complete_steps(folder: Path, ckpt_format: str) -> list[int]:
    """Steps of the complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    steps = {path: path.name.removeprefix("iter_") for path in folder.glob("iter_*")}
    return sorted(int(text) for path, text in steps.items() if text.isdigit() and flaw_of(path, ckpt_format) is None)


def check_loadable(
    folder: Path,
    ckpt_step: int | None,
    ckpt_format: str,
    find_flaw: Callable[[Path, str], str | None] = flaw_of,
) -> None:
    """Refuse to resume from what is not complete, or to start anew beside a checkpoint that nothing names.

    Args:
        ckpt_step: the user's ``--ckpt-step``; None for what the tracker names.
        find_flaw: :func:`flaw_of`, or :func:`outline_flaw_of` where every rank looks.

    Raises:
        UsageError: says what is the matter, and which checkpoints are complete. Nothing at all in the folder is no
            error: then a run begins, as in stock.
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
    flaw = find_flaw(checkpoint, ckpt_format)
    if flaw is not None:
        source = "--ckpt-step" if ckpt_step else TRACKER
        raise UsageError(
            f"the checkpoint {checkpoint}, named by {source}, can't be loaded: {flaw}. "
            f"{_advice(folder, step, ckpt_format)}"
        )


def _advice(folder: Path, unfit: int | str | None, ckpt_format: str) -> str:
    """Which checkpoints can be used instead, and how."""
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
    """How much its files take."""
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def remove_leftover(folder: Path, step: int | str) -> None:
    """Remove what a save of the same step left that never ended."""
    shutil.rmtree(folder / f"{INCOMPLETE}{name_of(step)}", ignore_errors=True)


def publish(folder: Path, step: int | str) -> None:
    """Give a checkpoint that is complete its name. One of that name from before, also a complete one, is replaced."""
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
    """A file to write the step of a complete checkpoint to: then that is published, and the tracker changes at once.

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
