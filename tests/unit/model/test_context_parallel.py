"""Megatron's cut of a sequence and our way back are inverse, for any number of ranks."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lancet.model.attention import sdpa
from megatron_lancet.model.attention.sdpa import gather_positions, own_slices
from megatron_lancet.patching import replaced
from megatron_lancet.training.platform.cpu import cpu_platform


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gathered_positions_are_in_sequence_order(num_ranks):
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

    positions = torch.arange(3 * 2 * num_ranks)
    slices = positions.chunk(2 * num_ranks)
    groups = [SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: num_ranks) for rank in range(num_ranks)]
    with cpu_platform():
        parts = [get_pos_emb_on_this_cp_rank(positions, 0, group) for group in groups]
    for group, part in zip(groups, parts, strict=True):
        assert part.equal(torch.cat([slices[number] for number in own_slices(group)]))

    def gather(part, group):
        return torch.cat(parts)

    with replaced(sdpa, "gather_from_sequence_parallel_region", gather):
        assert all(gather_positions(part, group).equal(positions) for group, part in zip(groups, parts, strict=True))
