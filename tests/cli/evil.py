"""Pickles that run code when they are loaded; the code touches a file."""

import io
from pathlib import Path

import torch


def calls(victim: Path) -> bytes:
    """A pickle that calls a function."""
    return b"(cpathlib\nPosixPath\n(V" + str(victim).encode() + b"\ntRtR."


def evil_archive(victim: Path) -> bytes:
    """What torch.save would write of an object whose loading touches a file."""

    class Evil:
        def __reduce__(self):
            return Path.touch, (victim,)

    file = io.BytesIO()
    torch.save([Evil()], file, _use_new_zipfile_serialization=False)  # a reader of this form stops where it ends
    return file.getvalue()
