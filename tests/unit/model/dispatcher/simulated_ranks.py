"""All ranks of a world in one process, whose dispatchers exchange token counts. Legend of shapes as in the tests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from megatron_lancet.runtime.transport.base import TokenCounts

HIDDEN = 3


@dataclass
class Exchange:
    """The counts of one rank, [P][...], known when all ranks have sent theirs to ``of_all``; [P * V * (1 + e)] each."""

    rank: int
    num_ranks: int
    of_all: list[torch.Tensor]

    def wait_for_own(self) -> list[list[int]]:
        return self.of_all[self.rank].view(self.num_ranks, -1).tolist()

    def wait(self) -> TokenCounts:
        received = torch.stack([sent.view(self.num_ranks, -1)[self.rank] for sent in self.of_all])
        return TokenCounts(self.wait_for_own(), received.tolist(), received)


@dataclass
class Comm:
    """Stands in for the runtime's: makes the counts of the ranks in turn, rank 0 first."""

    num_ranks: int
    counts: list[torch.Tensor] = field(default_factory=list)
    max_expert_rows: int | None = None

    def launch_counts(self, op: object, count: Callable[[], torch.Tensor], ready: object) -> Exchange:
        self.counts.append(count())
        return Exchange(len(self.counts) - 1, self.num_ranks, self.counts)


def group_of(size: int, rank: int = 0) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


@dataclass(frozen=True)
class Inputs:
    """What the router of each rank gives: tokens [t, 1, H], probabilities [t, E] and choice [t, E] bool."""

    hidden: list[torch.Tensor]
    probs: list[torch.Tensor]
    maps: list[torch.Tensor]

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [*self.hidden, *self.probs]


@dataclass(frozen=True)
class Seen:
    """What the experts of one rank see, in order."""

    tokens_mH: torch.Tensor
    probs_m: torch.Tensor
    rows_per_expert: list[int]


def inputs_of(maps: list[torch.Tensor], dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    """Random tokens and probabilities for these choices; the latter are zero for what was not chosen."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    hidden = [(random(len(map_tE), 1, HIDDEN) - 0.5).requires_grad_() for map_tE in maps]
    probs = [(random(*map_tE.shape) * map_tE).to(dtype).requires_grad_() for map_tE in maps]
    return Inputs(hidden, probs, maps)
