"""The flags of a placement."""

from dataclasses import dataclass
from pathlib import Path

from megatron_lancet.flags import CheckedFlags, flag


@dataclass(frozen=True)
class PlacementFlags(CheckedFlags):
    """Placement of experts, and whether they move."""

    expert_placement: Path | None = flag(
        None,
        read=Path,
        metavar="FILE",
        unchecked="",
        help="place experts on ranks by FILE, which lancet plan experts writes. Losses, logs and checkpoints keep "
        "the model's expert indices.",
    )
    rebalance_interval: int | None = flag(
        None,
        parsed_as=int,
        at_least=2,
        metavar="N",
        advice="Without the flag experts stay where they are.",
        unchecked="",
        help="every N steps, move experts (weights and optimizer state) to other ranks if the load of these steps "
        "shows that it pays.",
    )

    @property
    def places_experts(self) -> bool:
        """Whether experts may be on other ranks than Megatron's."""
        return self.expert_placement is not None or self.rebalance_interval is not None
