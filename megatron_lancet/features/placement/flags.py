"""The flag of a placement."""

from dataclasses import dataclass
from pathlib import Path

from megatron_lancet.flags import CheckedFlags, flag


@dataclass(frozen=True)
class PlacementFlags(CheckedFlags):
    """Placement of experts."""

    expert_placement: Path | None = flag(
        None,
        read=Path,
        metavar="FILE",
        unchecked="",
        help="place experts on ranks by FILE, which lancet plan experts writes. Losses, logs and checkpoints keep "
        "the model's expert indices.",
    )
