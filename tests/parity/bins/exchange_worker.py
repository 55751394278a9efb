"""Four ranks deal the samples of three steps to bins, and of the last step once more, as a resumed run does."""

import random
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.planning.documents.cost import DocumentCost

NUM_RANKS, NUM_STEPS = 4, 3
NUM_BINS, SAMPLES_OF_STACK = 2, 3
MAX_TOKENS = 60
COST = DocumentCost(0.05)


def tokens(rank: int, step: int, index: int) -> list[int]:
    """A sample, which no other one is like."""
    number = (rank * NUM_STEPS + step) * NUM_BINS * SAMPLES_OF_STACK + index
    return [number, *random.Random(number).choices(range(1, 500), k=random.Random(number).randint(1, 40))]


def labelled(row: list[int]) -> list[int]:
    """Which tokens of a sample count."""
    return [token % 3 > 0 for token in row]


def stacks(rank: int, step: int) -> list[dict[str, torch.Tensor]]:
    """What a data loader draws in a step."""
    rows = [tokens(rank, step, index) for index in range(NUM_BINS * SAMPLES_OF_STACK)]
    found = []
    for first in range(0, len(rows), SAMPLES_OF_STACK):
        stack = rows[first : first + SAMPLES_OF_STACK]
        filled = [[*row, *[0] * (42 - len(row))] for row in stack]
        found.append(
            {
                "tokens": torch.tensor(filled, dtype=torch.int32),
                "is_label": torch.tensor([labelled(row) for row in filled], dtype=torch.uint8),
                "num_tokens": torch.tensor([len(row) for row in stack]),
            }
        )
    return found


def batches(steps: range) -> list[list[dict[str, Any]]]:
    from megatron_lancet.features.bins.exchange import Exchange
    from megatron_lancet.features.bins.step import BinLoader, BinnedSteps, BinSettings

    exchange = Exchange(dist.group.WORLD, torch.device("cpu"))
    drawn = [stack for step in steps for stack in stacks(dist.get_rank(), step)]
    made = BinnedSteps(BinSettings(COST, MAX_TOKENS, multiple=2, at_least=4), exchange, None)
    bins = list(BinLoader(drawn, made, lambda: NUM_BINS))
    plain = [{name: tensor.tolist() for name, tensor in batch.items()} for batch in bins]
    return [plain[first : first + NUM_BINS] for first in range(0, len(plain), NUM_BINS)]


def all_results() -> dict[str, Any]:
    """By way of dealing the batches of this rank, by step."""
    whole, last = range(NUM_STEPS), range(NUM_STEPS - 1, NUM_STEPS)
    return {"whole": batches(whole), "resumed": batches(last)}
