"""What is in a distributed checkpoint, read without ranks."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def tensors_in(checkpoint: Path, is_wanted: Callable[[str], bool] = lambda name: True) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors whose names are wanted."""
    reader = FileSystemReader(checkpoint)
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and is_wanted(name)
    }
    _load_state_dict(wanted, reader, no_dist=True)
    return wanted
