"""A distributed checkpoint's description, read without running anything that stands in it.

torch keeps the list of a checkpoint's parts (``.metadata``) as a pickle, which it loads without limits, and so it does
with parts that are no tensors. A pickle can name any function of any module. Here only the names that torch itself
writes are let through, and parts are read by torch's restricted reader. What has passed may go to Megatron's loader.
"""

import argparse
import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.training.checkpoint.files import INDEX, RELEASE, TRACKER, name_of

_COMMON = "common_state/shard_0_1"
"""What is no tensor and the same on all ranks: the arguments of the run, the iteration."""

_INDEX_CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
}
"""All that torch 2.11 to 2.13 write into the list of parts, beside dtypes."""


@dataclass(frozen=True)
class StoredRun:
    """A checkpoint, before its weights are loaded.

    Attributes:
        folder: of its files.
        iteration: training steps behind it.
        arguments: of the run that wrote it.
        content: Megatron's description of how the state is laid out, for its loader.
    """

    folder: Path
    iteration: int
    arguments: argparse.Namespace
    content: dict[str, Any] | None


class _Refused(Exception):  # noqa: N818 - says what was refused
    """A name in a pickle that has no business there."""


class _IndexUnpickler(pickle.Unpickler):
    """Reads a list of parts; any other class or function than those it consists of is refused, not imported."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise _Refused(f"{module}.{name}")


def find_checkpoint(load: Path, step: int | None = None) -> Path:
    """Folder of a checkpoint below ``--load``.

    Args:
        load: where training saved; or the folder of one checkpoint (``iter_0000500``).
        step: of the checkpoint; None takes the latest.

    Raises:
        UsageError: there is none, or of another format.
    """
    if not load.is_dir():
        raise UsageError(f"--load: there is no folder {load}. Pass what training was given as --save.")
    if step is not None:
        folder = load / name_of(step)
    elif (load / INDEX).is_file():
        folder = load
    else:
        folder = load / _tracked(load / TRACKER)
    if not folder.is_dir():
        there = ", ".join(sorted(path.name for path in load.glob("iter_*"))) or "none"
        raise UsageError(f"--load: there is no checkpoint {folder}; in {load} there are: {there}.")
    if not (folder / INDEX).is_file():
        raise UsageError(
            f"{folder} is no complete distributed checkpoint: {INDEX} is missing. Checkpoints are read that were "
            "saved with --ckpt-format torch_dist, Megatron's default."
        )
    return folder


def _tracked(tracker: Path) -> str:
    """Name of the folder that the tracker file names."""
    if not tracker.is_file():
        raise UsageError(f"--load: no checkpoint in {tracker.parent}: {tracker.name} is missing there.")
    text = tracker.read_text(errors="replace").strip()
    if text == RELEASE:
        return name_of(text)
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise UsageError(f"{tracker} must hold the number of a step, it holds {text[:40]!r}. Pass --step.")
    return name_of(text)


def read_run(folder: Path) -> StoredRun:
    """Read what a checkpoint says of itself, and check that all of it is there and harmless.

    Raises:
        UsageError: it is damaged, incomplete, or names code.
    """
    index = _read_index(folder)
    _check_sizes(folder, index)
    common = None
    places = {getattr(key, "fqn", None): place for key, *place in _parts(index)}
    for key, meta in index.state_dict_metadata.items():
        # Of the rest, only what belongs to the model will be asked for.
        if type(meta).__name__ == "BytesStorageMetadata" and not key.startswith(("optimizer", "rng_state", "rerun")):
            value = _read_bytes(folder, places, key)
            common = value[0] if key == _COMMON and isinstance(value, list) and value else common
    if common is None and (folder / "common.pt").is_file():
        common = _restricted_load((folder / "common.pt").read_bytes(), folder / "common.pt")
    arguments = common.get("args") if isinstance(common, dict) else None
    if not isinstance(arguments, argparse.Namespace) or not isinstance(common, dict):
        raise UsageError(
            f"{folder} does not hold the arguments of the run that wrote it; it is no training checkpoint."
        )
    iteration = common.get("iteration", 0)
    return StoredRun(folder, iteration if isinstance(iteration, int) else 0, arguments, common.get("content_metadata"))


def _read_index(folder: Path) -> Any:
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
        storage, entries = index.storage_data, index.state_dict_metadata
        if not isinstance(storage, dict) or not isinstance(entries, dict) or not all(type(k) is str for k in entries):
            raise TypeError("no list of parts")
        return index
    except _Refused as error:
        raise UsageError(
            f"{path} names {error}, which is no part of a checkpoint's description: loading it might run code. "
            "It was not loaded. Use checkpoints from sources that you trust."
        ) from None
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}") from error
    except Exception as error:
        raise UsageError(f"{path} is damaged ({type(error).__name__}). {_ANOTHER}") from error


_ANOTHER = "Pass another checkpoint with --load or --step."


def _parts(index: Any) -> Iterator[tuple[Any, str, int, int]]:
    """Key, file, offset and length in bytes of every part."""
    for key, part in index.storage_data.items():
        yield key, str(part.relative_path), int(part.offset), int(part.length)


def _check_sizes(folder: Path, index: Any) -> None:
    ends: dict[str, int] = {}
    try:
        for _, name, offset, length in _parts(index):
            if offset < 0 or length < 0 or Path(name).name != name:
                raise ValueError(name)
            ends[name] = max(ends.get(name, 0), offset + length)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{folder / INDEX} is damaged: {error}. {_ANOTHER}") from error
    for name, num_bytes in ends.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found is None:
            raise UsageError(f"the checkpoint {folder} is incomplete: {name} is missing. {_ANOTHER}")
        if found < num_bytes:
            raise UsageError(
                f"the checkpoint {folder} is truncated: {name} has {found} bytes of {num_bytes}. {_ANOTHER}"
            )


def _read_bytes(folder: Path, places: dict[str | None, list[Any]], key: str) -> Any:
    """A part that is no tensor."""
    if key not in places:
        raise UsageError(f"{folder / INDEX} is damaged: it has no place for {key!r}. {_ANOTHER}")
    name, offset, length = places[key]
    with (folder / name).open("rb") as file:
        file.seek(offset)
        return _restricted_load(file.read(length), folder / name)


def _restricted_load(data: bytes, path: Path) -> Any:
    """Torch's restricted reader, with the classes that Megatron declares harmless."""
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
