"""Token counts of a world in which each rank receives from every other rank what it sends to that rank."""

import torch


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
