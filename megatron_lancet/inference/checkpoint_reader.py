"""A distributed checkpoint's description, read without running any code that the checkpoint contains.

Torch loads the list of a checkpoint's parts, and parts that are no tensors, as pickles without limits. A pickle can
name any function of any module. Here only the names that torch itself writes are accepted (``index.py``), and parts
are read by torch's restricted reader. A checkpoint that passes is safe for Megatron's loader.
"""

import argparse
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_lancet.checkpoint.files import TRACKER, name_of, read_tracker
from megatron_lancet.checkpoint.index import INDEX, DamagedIndex, Index, Part, read_index
from megatron_lancet.errors import UsageError

_ANOTHER = "Pass another checkpoint with --load or --step."
_COMMON = "common_state/shard_0_1"
"""The part that is no tensor and the same on all ranks: the arguments of the run, the iteration."""


@dataclass(frozen=True)
class StoredRun:
    """A checkpoint, before its weights are loaded.

    Attributes:
        folder: the folder with its files.
        iteration: number of training steps done when it was saved.
        arguments: Megatron's arguments of the run that wrote it.
        content: Megatron's description of how the state is laid out, for its loader.
    """

    folder: Path
    iteration: int
    arguments: argparse.Namespace
    content: dict[str, Any] | None


def find_checkpoint(load: Path, step: int | None = None) -> Path:
    """Find the folder of a checkpoint below ``--load``.

    Args:
        load: folder that training saved to, or the folder of one checkpoint (``iter_0000500``).
        step: step of the checkpoint; None takes the latest.

    Raises:
        UsageError: there is no such checkpoint, or it has another format.
    """
    if not load.is_dir():
        raise UsageError(f"--load: there is no folder {load}. Pass what training was given as --save.")
    if step is not None:
        folder = load / name_of(step)
    elif (load / INDEX).is_file():
        folder = load
    else:
        try:
            tracked = read_tracker(load)
        except ValueError as error:
            raise UsageError(f"{error}. Pass --step.") from None
        if tracked is None:
            raise UsageError(f"--load: no checkpoint in {load}: {TRACKER} is missing there.")
        folder = load / name_of(tracked)
    if not folder.is_dir():
        there = ", ".join(sorted(path.name for path in load.glob("iter_*"))) or "none"
        raise UsageError(f"--load: there is no checkpoint {folder}; in {load} there are: {there}.")
    if not (folder / INDEX).is_file():
        raise UsageError(
            f"{folder} is no complete distributed checkpoint: {INDEX} is missing. Pass a checkpoint that was saved "
            "with --ckpt-format torch_dist, Megatron's default."
        )
    return folder


def read_run(folder: Path) -> StoredRun:
    """Read a checkpoint's description of itself, and check that its files are complete and harmless.

    Raises:
        UsageError: the checkpoint is damaged, incomplete, or names code.
    """
    index = _checked_index(folder)
    common = None
    places = {part.key: part for part in index.parts}
    for key in index.keys_of_bytes:
        # Megatron's loader will read only entries of the model.
        if not key.startswith(("optimizer", "rng_state", "rerun")):
            value = _read_bytes(folder, places, key)
            common = value[0] if key == _COMMON and isinstance(value, list) and value else common
    if common is None and (folder / "common.pt").is_file():
        common = _restricted_load((folder / "common.pt").read_bytes(), folder / "common.pt")
    arguments = common.get("args") if isinstance(common, dict) else None
    if not isinstance(arguments, argparse.Namespace) or not isinstance(common, dict):
        raise UsageError(f"{folder} lacks the arguments of the run that wrote it; it is no training checkpoint.")
    iteration = common.get("iteration", 0)
    return StoredRun(folder, iteration if isinstance(iteration, int) else 0, arguments, common.get("content_metadata"))


def _checked_index(folder: Path) -> Index:
    path = folder / INDEX
    try:
        index = read_index(folder)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}") from error
    except DamagedIndex as error:
        _check_names(path, error.foreign_names)
        raise UsageError(f"{path} is damaged ({error}). {_ANOTHER}") from error
    _check_names(path, index.foreign_names)
    flaw = index.missing_part(folder)
    if flaw is not None:
        raise UsageError(f"the checkpoint {folder} is incomplete: {flaw}. {_ANOTHER}")
    return index


def _check_names(path: Path, foreign_names: Sequence[str]) -> None:
    if foreign_names:
        raise UsageError(
            f"{path} names {foreign_names[0]}, which does not belong in a checkpoint's description: loading it might "
            "run code. It was not loaded. Use checkpoints from sources that you trust."
        )


def _read_bytes(folder: Path, places: dict[str | None, Part], key: str) -> Any:
    if key not in places:
        raise UsageError(f"{folder / INDEX} is damaged: it has no place for {key!r}. {_ANOTHER}")
    part = places[key]
    with (folder / part.file).open("rb") as file:
        file.seek(part.offset)
        return _restricted_load(file.read(part.num_bytes), folder / part.file)


def _restricted_load(data: bytes, path: Path) -> Any:
    """Unpickles with torch's restricted reader, which also accepts the classes that Megatron declares harmless."""
    from megatron.core.safe_globals import SAFE_GLOBALS

    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line or "global" in line), "")
        raise UsageError(
            f"{path}: torch's restricted reader refuses a part of it: it is damaged, or loading it might run code. "
            f"{reason.strip()[:200]}"
        ) from error
    except Exception as error:
        raise UsageError(f"{path} is damaged ({type(error).__name__}). {_ANOTHER}") from error
