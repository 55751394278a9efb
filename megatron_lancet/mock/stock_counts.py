"""Lets stock Megatron's all-to-all dispatcher learn the token counts of a loopback.

Stock learns them by an all-gather, in the mock N copies of this rank's counts: every rank would send to this rank's
experts what this rank sends to them. But in a loopback rank j sends here what was sent to rank j.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher

from megatron_lancet.patching import wrapped


def loopback_counts() -> AbstractContextManager[None]:
    """Replaces the all-gathered counts inside the context by those of the loopback; takes as long."""

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def gather(input_: torch.Tensor, *args: Any, group: dist.ProcessGroup | None = None, **kwargs: Any) -> Any:
            gathered = stock(input_, *args, group=group, **kwargs)
            # Counts are the only thing that it gathers in one dimension and without a gradient.
            if group is None or input_.dim() != 1 or input_.is_floating_point():
                return gathered
            return counts_of_all_ranks(input_, group.rank(), group.size())

        return gather

    return wrapped(token_dispatcher, "gather_from_sequence_parallel_region", wrap)


def counts_of_all_ranks(own_counts: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """Counts of a world in which each rank receives from every other one what it sends to it.

    Rank j routes like this rank, to ranks that are j - rank further on: then it sends to rank i what i sends to it.

    Args:
        own_counts: [E], rows for each expert of all ranks.

    Returns:
        [P * E], rank j's counts from j * E on.
    """
    by_peer = own_counts.view(num_ranks, -1)
    ranks = torch.arange(num_ranks, device=own_counts.device)
    return by_peer[(ranks[:, None] + ranks[None, :] - rank) % num_ranks].reshape(-1)
