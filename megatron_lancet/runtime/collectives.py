"""Small collectives of Python objects."""

from collections.abc import Callable

import torch.distributed as dist


def from_rank_0[Answer](ask: Callable[[], Answer]) -> Answer:
    """What ``ask`` returns on rank 0, on all ranks. Collective."""
    answers = [ask() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answers, src=0)
    answer: Answer = answers[0]  # type: ignore[assignment]
    return answer
