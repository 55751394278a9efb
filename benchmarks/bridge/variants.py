"""The trainings that are compared: stock and a plan, in Megatron's own loop and in Megatron-Bridge's."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.auto.cases import Variant
from benchmarks.demo.folder import REPOSITORY, Folder
from megatron_lancet.errors import UsageError

NAME, SHARE, MICRO_BATCHES, TOPK, EXPERTS = "45-m4", 0.45, 4, 2, 4
"""The case: the part of its step for which stock is to wait in Megatron's own loop, and the shape of a step."""
STOCK, PLAN = "off", "plan"
BRIDGE_STOCK, BRIDGE_PLAN = "bridge-off", "bridge-plan"
_SETTINGS: dict[str, str | int] = {"num_chunks": 1, "pairing": "on", "dispatch": "dedup"}
_FLAGS = tuple(word for name, value in _SETTINGS.items() for word in (f"--lancet-{name.replace('_', '-')}", str(value)))

FOR_RATE = Variant("rate", ("--lancet-plan", "off"), "stock on our transport, which counts bytes: sets the rate")
MEGATRON = (
    Variant(STOCK, ("--lancet-plan", "off"), "stock in Megatron's loop", ("--own-messages",)),
    Variant(PLAN, _FLAGS, "pairs of one chunk, dedup, in Megatron's loop"),
)
BRIDGE = (
    Variant(BRIDGE_STOCK, (), "stock in Bridge's loop"),
    Variant(BRIDGE_PLAN, (), "the plan in Bridge's loop", ("--settings", json.dumps(_SETTINGS))),
)
MEANING = {variant.name: variant.meaning for variant in (*MEGATRON, *BRIDGE)}


def bridge_path() -> Path:
    """The folder of Megatron-Bridge, which ``make test-bridge`` also uses.

    Raises:
        UsageError: it is not there.
    """
    path = Path(sys.prefix) / "bridge"
    if not (path / "megatron" / "bridge").is_dir():
        raise UsageError(f"expected Megatron-Bridge in {path}, found none. Run make bench-bridge, which installs it.")
    return path


def bridge_options(folder: Folder) -> Sequence[str]:
    """Options of :mod:`benchmarks.bridge.rank` for the data of Megatron's own loop."""
    return ("--data", str(folder.dataset), "--tokenizer", str(folder.tokenizer), "--cache", str(folder.cache))


def import_paths() -> tuple[Path, ...]:
    """Folders that come first in the import path of Bridge's ranks: its packages are newer than the pinned ones."""
    return (bridge_path(), REPOSITORY)
