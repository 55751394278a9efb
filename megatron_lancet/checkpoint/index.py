"""A distributed checkpoint's list of parts (``.metadata``), read without importing or running anything that it names.

Torch keeps the list as a pickle, which can name any function of any module, and loads it without limits. Here every
name becomes a class that does nothing. Names that torch itself does not write there are reported, so that a caller can
refuse the checkpoint before torch's own loader sees it.
"""

import collections
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

INDEX = ".metadata"

_KNOWN_NAMES = {
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
"""All names that torch 2.11 to 2.15 write into the list of parts, next to dtypes."""


class DamagedIndex(ValueError):  # noqa: N818 - the name states the fault
    """The file is no list of parts. ``foreign_names`` as in :class:`Index`, as far as it was read."""

    def __init__(self, reason: str, foreign_names: tuple[str, ...]) -> None:
        super().__init__(reason)
        self.foreign_names = foreign_names


@dataclass(frozen=True)
class Part:
    """The place of one part of the state.

    Attributes:
        key: name of the state's entry; the parts of one tensor have the same key.
        file: name in the checkpoint's folder.
        offset: position of the first byte in the file.
    """

    key: str | None
    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Index:
    """The list of parts.

    Attributes:
        keys_of_bytes: keys of the state's entries that are no tensors.
        foreign_names: functions and classes that torch does not write there, for example ``os.system``.
    """

    parts: tuple[Part, ...]
    keys_of_bytes: tuple[str, ...]
    foreign_names: tuple[str, ...]

    def missing_part(self, checkpoint: Path) -> str | None:
        """Names the first file that is missing, or shorter than its parts need; None if all files are complete."""
        sizes: dict[str, int] = {}
        for part in self.parts:
            sizes[part.file] = max(sizes.get(part.file, 0), part.offset + part.num_bytes)
        for file, num_bytes in sizes.items():
            if not (checkpoint / file).is_file():
                return f"{file} is missing"
            found = (checkpoint / file).stat().st_size
            if found < num_bytes:
                return f"{file} is truncated: {found} bytes of {num_bytes}"
        return None


def read_index(checkpoint: Path) -> Index:
    """Read the list of a checkpoint's parts.

    Raises:
        OSError: the file can't be read.
        DamagedIndex: the file is no such list.
    """
    with (checkpoint / INDEX).open("rb") as file:
        unpickler = _InertUnpickler(file)
        try:
            content = unpickler.load()
            parts = tuple(_part(key, place) for key, place in content.storage_data.items())
            entries = {key: type(entry).__name__ for key, entry in content.state_dict_metadata.items()}
            if not all(isinstance(key, str) for key in entries):
                raise TypeError("keys must be text")
        except OSError:
            raise
        except Exception as error:  # damaged bytes may fail in any way
            raise DamagedIndex(type(error).__name__, tuple(unpickler.foreign_names)) from error
    keys_of_bytes = tuple(key for key, name in entries.items() if name == "BytesStorageMetadata")
    return Index(parts, keys_of_bytes, tuple(unpickler.foreign_names))


def _part(key: Any, place: Any) -> Part:
    fqn = getattr(key, "fqn", None)
    part = Part(fqn if isinstance(fqn, str) else None, str(place.relative_path), int(place.offset), int(place.length))
    if part.offset < 0 or part.num_bytes < 0 or Path(part.file).name != part.file:
        raise ValueError(part.file)
    return part


class _Inert:
    """Replaces every class that a pickle names: accepts any arguments and does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _InertUnpickler(pickle.Unpickler):
    """Reads a pickle without importing or running anything that it names."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.foreign_names: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _KNOWN_NAMES.get(module, ()):
            self.foreign_names.append(f"{module}.{name}")
        if name == "OrderedDict":
            return collections.OrderedDict
        return type(name, (_Inert,), {})
