"""A chunk's rows in parts between all ranks of a group, in one process: against the same rows in one message.

Legend: P ranks, e local experts, E = P * e, t tokens of a rank, m rows of a rank's experts, H hidden size.
"""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_lancet.features.dedup.dispatcher import DeduplicatedDispatcher
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.tiles.chunk import ChunkInParts
from megatron_lancet.features.tiles.parts import (
    PartedPlainRoutes,
    Tiling,
    count_parts,
    part_sizes,
    parted_routes,
)
from megatron_lancet.features.tiles.weight_grads import GatheredWeightGrads
from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher
from megatron_lancet.model.dispatcher.routes import Routes, cut_evenly
from megatron_lancet.runtime.factors import Factors
from megatron_lancet.schedule.dispatch import PLAIN, LocalTokens
from tests.draws import examples
from tests.unit.model.dispatcher.simulated_ranks import Comm, Inputs, group_of, inputs_of
from tests.unit.model.dispatcher.test_deduplicated import ALL_DROPPED, ONE_RANK_SENDS, exchange, weighted, worlds

TILINGS = st.builds(Tiling, st.integers(1, 4), st.integers(0, 2))
ONE_TOKEN = [torch.tensor([[True, False, True, True]]), torch.tensor([[False, False, False, True]])]


class CommOf(Comm):
    """Of one rank, whose counts go to those of all ranks."""

    def __init__(self, rank: int, counts: list[torch.Tensor], num_ranks: int) -> None:
        super().__init__(num_ranks, counts)
        self.own_rank = rank


def exchange_in_parts(
    kind: type[AllToAllDispatcher] | type[DeduplicatedDispatcher], inputs: Inputs, tiling: Tiling, num_spare: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Runs the layer on all ranks: each one's output [t, 1, H], and the rows of which the dW of each expert is made.

    Args:
        num_spare: rows that are made and not sent.
    """
    num_ranks = len(inputs.maps)
    counts: list[torch.Tensor] = []
    num_experts = inputs.maps[0].size(1)
    ranks = range(num_ranks)
    dispatchers = [kind(CommOf(rank, counts, num_ranks), num_experts, num_ranks, group_of(1)) for rank in ranks]
    pending = []
    for rank in ranks:
        in_parts = {"in_parts": partial(count_parts, tiling=tiling, own_rank=rank)}
        told = in_parts if kind is DeduplicatedDispatcher else {}
        pending.append(dispatchers[rank].launch_counts(None, inputs.maps[rank], None, **told))
    chunks, permutations, gathered = [], [], []
    for rank, of_rank in enumerate(zip(inputs.hidden, inputs.probs, inputs.maps, strict=True)):
        rows, permutation = dispatchers[rank].permute(*of_rank, pending[rank].num_sent() + num_spare)
        routes = parted_routes(dispatchers[rank], pending[rank], tiling, rank, rows[1])
        by_source = partial(getattr, routes, "received_by_source")
        gathered.append(GatheredWeightGrads(tiling.num_parts, by_source, {}, None))
        chunks.append(ChunkInParts(routes, gathered[-1], rows))
        permutations.append(permutation)
    for tile in range(tiling.num_tiles):
        deliver(chunks, tile, back=False)
    wholes: list[list[torch.Tensor]] = [[] for _ in ranks]
    for rank, chunk in enumerate(chunks):
        for part in range(tiling.num_parts):
            routes, received = chunk.routes.routes(part), chunk.rows[part]
            assert sum(routes.splits.received) == len(received[0])

            def run(tokens_mH, probs_m, rank=rank, part=part, routes=routes):
                sizes = routes.rows_per_expert.tolist()
                for expert, rows_TH in enumerate(tokens_mH.split(sizes)):
                    whole = gathered[rank].add("fc1", expert, part, Factors(rows_TH, rows_TH))
                    assert (whole is not None) == (part == tiling.num_parts - 1)
                    if whole is not None:
                        wholes[rank].append(whole.joined().input_TI)
                return weighted(rank, tokens_mH, probs_m)

            tokens, probs = dispatchers[rank].collect(received, routes)
            output = dispatchers[rank].through_experts(run, tokens, probs, routes)
            chunk.rows[part] = (dispatchers[rank].sort_by_peer(output, routes, torch.float32),)
    for tile in range(tiling.num_tiles):
        deliver(chunks, tile, back=True)
    outputs = [dispatchers[rank].unpermute(chunk.joined(), permutations[rank]) for rank, chunk in enumerate(chunks)]
    return outputs, [torch.cat(of_experts) for of_experts in wholes]


def deliver(chunks: list[ChunkInParts], tile: int, back: bool) -> None:
    """Sends a tile of each rank as its splits say; local tokens that are parts of their own are in none."""
    part = chunks[0].routes.tiling.part_of_tile(tile)
    splits = [chunk.routes.known_splits(tile) for chunk in chunks]
    splits = [one.reversed() if back else one for one in splits]
    sent = [[tensor.split(splits[rank].sent) for tensor in chunk.rows[part]] for rank, chunk in enumerate(chunks)]
    for rank, chunk in enumerate(chunks):
        assert splits[rank].sent[rank] == splits[rank].received[rank]
        assert splits[rank].sent[rank] == 0 or not chunk.routes.tiling.num_own
        assert splits[rank].received == tuple(one.sent[rank] for one in splits)
        chunk.rows[part] = tuple(torch.cat([source[rank] for source in of_all]) for of_all in zip(*sent, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [AllToAllDispatcher, DeduplicatedDispatcher])
@given(worlds(), TILINGS, st.integers(0, 3))
@example(ALL_DROPPED, Tiling(2, 2), 0)
@example(ONE_RANK_SENDS, Tiling(4, 1), 1)
@example(ONE_TOKEN, Tiling(4, 2), 2)
@example(ONE_TOKEN, Tiling(3, 0), 1)
@examples(40)
def test_parts_give_outputs_and_weight_gradients_of_all_rows(kind, maps, tiling, num_spare):
    """To the bit: each row goes through its experts once, and comes back to its place; a dW has stock's order of rows.

    Also gradients of the inputs: a row that is made and not sent has none.
    """
    num_spare = num_spare if kind is DeduplicatedDispatcher else 0  # the plain one makes as many as are sent
    inputs = inputs_of(maps)
    outputs, wholes = exchange_in_parts(kind, inputs, tiling, num_spare)
    expected, seen = exchange(kind, inputs)
    assert all(map(torch.equal, outputs, expected))
    assert all(whole.equal(one.tokens_mH) for whole, one in zip(wholes, seen, strict=True))
    ours, theirs = (
        torch.autograd.grad(found, inputs.leaves, [one.cos() for one in found]) for found in (outputs, expected)
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@given(st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), min_size=1, max_size=5), st.integers(1, 9))
def test_parts_of_a_pair_are_a_partition_as_even_as_possible(rows_Qe, number):
    parts = cut_evenly(torch.tensor(rows_Qe), number)
    assert parts.sum(dim=0).tolist() == rows_Qe
    assert int(parts.min()) >= 0
    for pair, of_experts in enumerate(rows_Qe):
        sizes = parts[:, pair].sum(dim=1).tolist()
        assert sizes == part_sizes(sum(of_experts), number)
        assert max(sizes) - min(sizes) <= 1
        # Neighbours in the order by expert: what is in a part begins where the part before it ends.
        ends = parts[:, pair].cumsum(dim=0)
        for before, own in pairwise([torch.zeros_like(ends[0]), *ends]):
            first = int((own > before).nonzero().min()) if bool((own > before).any()) else None
            assert first is None or before[:first].tolist() == of_experts[:first]


@pytest.mark.parametrize("holders", [1, 2])
def test_parts_of_even_routes_need_no_counts(holders):
    """Three rows from each rank for each of two experts, of two ranks whose experts have one or two holders."""
    routes = Routes.even(3, 2, 2, holders, torch.device("cpu"))
    parts = PartedPlainRoutes(routes, Tiling(2, 1), 1, holders, holders - 1, torch.zeros(1))
    assert parts.sent == [[3, 3], [6]]
    assert [parts.splits(tile) for tile in (0, 1)] == [parts.known_splits(0)] * 2
    assert parts.splits(0).sent == parts.splits(0).received == (3, 0)
    of_all = [parts.routes(part).rows_per_expert.tolist() for part in range(3)]
    assert of_all == [[3 * holders, 3 * holders], [3 * holders, 0], [0, 3 * holders]]
    assert parts.routes(0).rows_by_expert_tp_rank == (6,) * holders
    assert parts.received_by_source.sum(dim=0).tolist() == [[3, 3]] * (2 * holders)


def test_parts_of_even_routes_may_have_local_tokens_in_the_tiles():
    routes = Routes.even(3, 2, 2, 1, torch.device("cpu"))
    parts = PartedPlainRoutes(routes, Tiling(2, 0), 1, 1, 0, torch.zeros(1))
    assert parts.sent == [[3, 3], [3, 3]]
    assert parts.splits(0).sent == parts.splits(1).received == (3, 3)
    assert [parts.routes(part).rows_per_expert.tolist() for part in range(2)] == [[6, 0], [0, 6]]


def test_segments_have_a_tiling_where_they_have_tiles():
    assert Tiling.of(PLAIN) is None
    assert Tiling.of(PLAIN.in_tiles(2)) == Tiling(2, 2)
    assert Tiling.of(DEDUP.in_tiles(4, LocalTokens.AFTER)) == Tiling(4, 1)
    assert Tiling.of(DEDUP.in_tiles(3, LocalTokens.TILED)) == Tiling(3, 0)
