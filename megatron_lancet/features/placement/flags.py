"""The flags of a placement."""

from dataclasses import dataclass
from pathlib import Path

from megatron_lancet.flags import CheckedFlags, flag


@dataclass(frozen=True)
class PlacementFlags(CheckedFlags):
    """Where experts are, and whether they move."""

    expert_placement: Path | None = flag(
        None,
        read=Path,
        metavar="FILE",
        unchecked="",
        help="put experts on the ranks that FILE says, a placement of tools/place_experts.py. Losses, logs and "
        "checkpoints keep the model's numbers of experts.",
    )
    rebalance_interval: int | None = flag(
        None,
        parsed_as=int,
        at_least=2,
        metavar="N",
        advice="Without the flag experts stay where they are.",
        unchecked="",
        help="let experts change their ranks after every N steps, where the load of these steps says that it pays: "
        "weights and optimizer state move from rank to rank.",
    )

    @property
    def places_experts(self) -> bool:
        """Whether experts may be on other ranks than Megatron's."""
        return self.expert_placement is not None or self.rebalance_interval is not None
