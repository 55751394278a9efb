"""The file with the prediction. No torch."""

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron_lancet.errors import UsageError

DEVICES = {"H100": 2.5e12, "H200": 3.6e12}
"""Memory traffic in bytes per second by device: 75 % of the 3.35e12 and 4.8e12 in NVIDIA's data sheets (SXM)."""
COMMAND = "python -m benchmarks.gpu.check.predict"
_FOLDER = Path(__file__).parents[1]


def committed(device: str) -> Path:
    """The committed prediction for a device of :data:`DEVICES`."""
    return _FOLDER / f"prediction-{device.lower()}.json"


def hash_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits.

    Raises:
        OSError: the file can't be read.
    """
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_prediction(path: Path) -> dict[str, Any]:
    """Reads a prediction.

    Raises:
        UsageError: the file is missing, or is no prediction.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: expected a prediction, found none ({error}). Make it by `{COMMAND}`.") from None
    if not isinstance(found, dict) or "variants" not in found:
        raise UsageError(f"{path}: expected an object with variants. Make it again by `{COMMAND}`.")
    return found


def as_text(prediction: dict[str, Any]) -> str:
    """The file's text: the same for equal predictions."""
    return json.dumps(prediction, indent=1) + "\n"
