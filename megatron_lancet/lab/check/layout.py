"""Sizes of the parallel axes of a run, and the same run with an axis less."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes.

    Attributes:
        virtual: pipeline stages of a rank.
        sequence: whether tensor-parallel ranks share out the sequence between their layers.
        data: ranks with the same weights, context parallelism apart.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False
    data: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the run."""
        return self.tensor * self.context * self.pipeline * self.data

    def words(self) -> list[str]:
        """Megatron's flags for this layout."""
        words = [
            *("--tensor-model-parallel-size", str(self.tensor)),
            *("--pipeline-model-parallel-size", str(self.pipeline)),
            *("--context-parallel-size", str(self.context)),
            *("--expert-model-parallel-size", str(self.expert)),
            *("--expert-tensor-parallel-size", str(self.expert_tensor)),
        ]
        words += ["--num-virtual-stages-per-pipeline-rank", str(self.virtual)] if self.virtual > 1 else []
        return words + (["--sequence-parallel"] if self.sequence else [])

    def fitted(self) -> "Layout":
        """The layout with the fewest data-parallel ranks, not fewer than now, that its experts can be shared out on."""
        ranks, experts = self.tensor * self.context, self.expert * self.expert_tensor
        share = experts // math.gcd(ranks, experts)
        return replace(self, data=math.ceil(self.data / share) * share)

    def __str__(self) -> str:
        sizes = {
            "TP": self.tensor,
            "PP": self.pipeline,
            "VPP": self.virtual,
            "CP": self.context,
            "EP": self.expert,
            "ETP": self.expert_tensor,
            "DP": self.data,
        }
        shown = [f"{name} {size}" for name, size in sizes.items() if size > 1] + (["SP"] if self.sequence else [])
        return ", ".join(shown) if shown else "one rank"


def without_an_axis(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yields each axis of the layout and the layout without it.

    Ranks that experts are shared out on become data-parallel ones where no other axis is left for them, so data
    parallelism may stay where it is removed, and is then not yielded.
    """
    changes: dict[str, dict[str, object]] = {
        "SP": {"sequence": False},
        "TP": {"tensor": 1, "sequence": False},
        "CP": {"context": 1},
        "EP": {"expert": 1},
        "ETP": {"expert_tensor": 1},
        "VPP": {"virtual": 1},
        "PP": {"pipeline": 1, "virtual": 1},
        "DP": {"data": 1},
    }
    for name, change in changes.items():
        less = replace(layout, **change)  # type: ignore[arg-type]
        if less == layout:
            continue
        less = less.fitted()
        if less != layout:
            yield name, less
