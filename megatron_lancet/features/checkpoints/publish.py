"""How a new checkpoint becomes the latest.

A checkpoint is written into a folder named ``incomplete_iter_0000008``. When all ranks have written and synced their
parts, the folder is renamed to ``iter_0000008``, and only then the tracker file names it. So every folder ``iter_...``
is complete, whenever a run is killed, unless it is damaged later or was written by stock Megatron.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megatron_lancet.checkpoint.files import name_of

INCOMPLETE = "incomplete_"


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
