"""Keys and values of all positions, where each rank of a context-parallel group has a part of the sequence.

Megatron cuts a sequence into 2N slices for N ranks; rank r gets slices r and 2N-1-r, so that causal attention costs
all ranks the same.

Legend of shapes: S sequence length, s = S / N positions of a rank.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


def own_slices(group: dist.ProcessGroup) -> tuple[int, int]:
    """Numbers of this rank's two slices, in the order in which it holds them."""
    return group.rank(), 2 * group.size() - 1 - group.rank()


def gather_positions(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All positions in their order, [S, ...] of each rank's [s, ...].

    Collective, and so is its backward pass, which sums the gradients that all ranks have for this one's positions.
    """
    slices = gather_from_sequence_parallel_region(part, group=group).chunk(2 * group.size())
    return torch.cat([*slices[0::2], *reversed(slices[1::2])])
