"""Checks of command line values that the tools share."""

import argparse
import os
from pathlib import Path

from megatron_lancet.errors import UsageError


def positive_int(text: str) -> int:
    """``type=`` of an argparse option that takes a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def positive_float(text: str) -> float:
    """``type=`` of an argparse option that takes a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def require_output_folder(target: Path) -> None:
    """Check before any work is done that ``target`` can be written.

    Raises:
        UsageError: the folder of ``target`` is missing, is not a folder or is read-only, or ``target``
            is itself a folder.
    """
    folder = target.parent
    if not folder.is_dir():
        raise UsageError(f"output folder {folder} does not exist (for {target.name}); create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"output folder {folder} is not writable (for {target.name})")
    if target.is_dir():
        raise UsageError(f"output {target} is an existing folder, expected a file name")
