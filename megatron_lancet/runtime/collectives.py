"""Small collectives of Python objects."""

from collections.abc import Callable
from typing import Any

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
