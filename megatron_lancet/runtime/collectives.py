"""Small collectives of Python objects, and new groups."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def from_rank_0[Answer](ask: Callable[[], Answer]) -> Answer:
    """Returns the result of rank 0's ``ask()`` on all ranks. Collective over the world."""
    answers = [ask() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answers, src=0)
    answer: Answer = answers[0]  # type: ignore[assignment]
    return answer


def from_all_ranks[Value](value: Value) -> list[Value]:
    """Returns the values of all ranks, by rank. Collective over the world."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def new_groups(
    own_ranks: Sequence[int],
    copies: int,
    timeout: timedelta,
    backend: str | None = None,
    like: dist.ProcessGroup | None = None,
) -> list[dist.ProcessGroup]:
    """Returns new groups of these ranks. Collective over the world: all ranks create the groups of all.

    Args:
        own_ranks: ranks of this one's groups, the same on all of them.
        copies: number of groups with the same ranks.
        timeout: limit of their collectives.
        backend: None for the world's.
        like: a group whose settings for NCCL the new groups also get; None for NCCL's own.
    """
    mine: list[dist.ProcessGroup] = []
    for ranks in sorted({tuple(ranks) for ranks in from_all_ranks(own_ranks)}):
        for _ in range(copies):
            options = None if like is None else _nccl_options(like)
            created = dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options)
            if ranks == tuple(own_ranks):
                mine.append(created)
    return mine


def _nccl_options(group: dist.ProcessGroup) -> Any:
    """A group's settings for NCCL, such as a bound on its SMs, for a new group; None with another backend."""
    if dist.Backend.NCCL not in str(dist.get_backend(group)):  # such as cpu:gloo,cuda:nccl
        return None
    given: Any = group._get_backend(torch.device("cuda")).options
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=given.is_high_priority_stream)
    options.config = given.config
    return options
