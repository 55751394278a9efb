"""Megatron in a mocked world: its command line, its logging on the last rank, and stock's token counts."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher
from megatron.training import arguments, training
from megatron.training.utils import common_utils

from megatron_lancet.patching import around


@contextmanager
def megatron_in_mocked_world(
    add_backend: Callable[[argparse.ArgumentParser], argparse.ArgumentParser],
) -> Iterator[None]:
    """Makes the only rank that exists do what Megatron does on the last one.

    Args:
        add_backend: adds the mock to Megatron's parser: its fault tolerance parses the command line again.
    """
    with (
        around(common_utils, "is_last_rank", lambda stock: True),  # the last rank logs
        around(training, "is_last_rank", lambda stock: True),
        around(arguments, "add_megatron_arguments", lambda stock, parser: add_backend(stock(parser))),
        loopback_counts(),
    ):
        yield


def loopback_counts() -> AbstractContextManager[None]:
    """Gives stock's all-to-all dispatcher the token counts of a loopback; the exchange takes as long as before.

    Stock exchanges counts by an all-gather, which returns N copies of this rank's counts in the mock: every rank would
    send to this rank's experts what this rank sends to them. But in a loopback rank j sends here what was sent to it.
    """

    def gather(
        stock: Any, input_: torch.Tensor, *args: Any, group: dist.ProcessGroup | None = None, **kwargs: Any
    ) -> Any:
        gathered = stock(input_, *args, group=group, **kwargs)
        # Counts are the only thing that it gathers in one dimension and without a gradient.
        if group is None or input_.dim() != 1 or input_.is_floating_point():
            return gathered
        return counts_of_all_ranks(input_, group.rank(), group.size())

    return around(token_dispatcher, "gather_from_sequence_parallel_region", gather)


def counts_of_all_ranks(own_counts: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """Counts of all ranks of a loopback, where all-to-alls return what was sent.

    Rank j routes like this rank, shifted by j - rank ranks: it then sends to rank i what i sends to it.

    Args:
        own_counts: [E], rows for each expert of all ranks.

    Returns:
        [P * E], rank j's counts from j * E on.
    """
    by_peer = own_counts.view(num_ranks, -1)
    ranks = torch.arange(num_ranks, device=own_counts.device)
    return by_peer[(ranks[:, None] + ranks[None, :] - rank) % num_ranks].reshape(-1)
