"""Deduplicated dispatch between all ranks of a group, in one process: against the plain dispatch, and its adjoint.

Legend: P ranks, e local experts, E = P * e, t tokens of a rank, m rows of a rank's experts, H hidden size.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_lancet.features.dedup.dispatcher import DeduplicatedDispatcher
from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher
from tests.unit.model.dispatcher.simulated_ranks import HIDDEN, Comm, Inputs, Seen, group_of, inputs_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


type Run = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


def weighted(rank: int, tokens_mH: torch.Tensor, probs_m: torch.Tensor) -> torch.Tensor:
    """Experts that multiply a row by its probability, and are not linear in the row."""
    return tokens_mH.sin() * probs_m[:, None].to(tokens_mH.dtype)


def exchange(
    kind: type[AllToAllDispatcher] | type[DeduplicatedDispatcher],
    inputs: Inputs,
    run: Run = weighted,
    last_expert_first: bool = False,
    num_spare: int = 0,
) -> tuple[list[torch.Tensor], list[Seen]]:
    """Runs the layer on all ranks: each one's output [t, 1, H], and what its experts saw.

    Args:
        num_spare: rows that are made and not sent.
    """
    num_ranks = len(inputs.maps)
    dispatcher = kind(Comm(num_ranks), inputs.maps[0].size(1), num_ranks, group_of(1))
    pending = [dispatcher.launch_counts(None, map_tE, None) for map_tE in inputs.maps]
    made = [
        dispatcher.permute(*of_rank, pending[rank].num_sent() + num_spare)
        for rank, of_rank in enumerate(zip(inputs.hidden, inputs.probs, inputs.maps, strict=True))
    ]
    splits = [(*one.splits().sent, num_spare) for one in pending]
    seen, returned = [], []
    for rank, routes in enumerate(one.wait() for one in pending):
        parts = [[tensor.split(splits[source])[rank] for tensor in rows] for source, (rows, _) in enumerate(made)]
        assert tuple(len(tokens) for tokens, _ in parts) == routes.splits.received
        received = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
        tokens, probs = dispatcher.collect(received, routes, last_expert_first)

        def keep(tokens_mH, probs_m, rank=rank, routes=routes):
            seen.append(Seen(tokens_mH, probs_m, routes.rows_per_expert.tolist()))
            return run(rank, tokens_mH, probs_m)

        output = dispatcher.through_experts(keep, tokens, probs, routes, last_expert_first)
        output = dispatcher.sort_by_peer(output, routes, torch.float32, last_expert_first)
        returned.append(output.split(routes.splits.received))
    outputs = [
        dispatcher.unpermute(torch.cat([of_peer[rank] for of_peer in returned]), permutation)
        for rank, (_, permutation) in enumerate(made)
    ]
    return outputs, seen


@st.composite
def worlds(draw) -> list[torch.Tensor]:
    """The choice of each rank's tokens: of few or many experts, with idle experts and ranks, and dropped tokens."""
    num_ranks, num_local = draw(st.integers(1, 4)), draw(st.integers(1, 20))
    num_experts = num_ranks * num_local
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    topk = draw(st.integers(1, min(8, num_experts)))
    only_rank = draw(st.none() | st.integers(0, num_ranks - 1))
    idle = torch.zeros(num_experts, dtype=torch.bool)
    if only_rank is not None:  # all tokens go to one rank, the others are idle
        idle[:] = True
        idle[only_rank * num_local : (only_rank + 1) * num_local] = False
    for expert in draw(st.sets(st.integers(0, num_experts - 1), max_size=3)):
        idle[expert] = True
    maps = []
    for _ in range(num_ranks):
        num_tokens = draw(st.integers(1, 7))
        scores = torch.rand((num_tokens, num_experts), generator=generator)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(topk).indices, True)
        chosen[:, idle] = False
        if draw(st.booleans()):  # a capacity drops some choices, and all of some tokens
            chosen &= torch.rand(chosen.shape, generator=generator) < 0.5
        maps.append(chosen)
    return maps


ALL_DROPPED = [torch.zeros((3, 4), dtype=torch.bool)] * 2
ONE_RANK_SENDS = [torch.ones((2, 4), dtype=torch.bool), torch.zeros((2, 4), dtype=torch.bool)]


@pytest.mark.thorough
@given(worlds())
@example(ALL_DROPPED)
@example(ONE_RANK_SENDS)
def test_sums_of_outputs_are_the_adjoint_of_copies_of_tokens(maps):
    """<y, A x> = <S y, x> for the rows A x that experts see, and the tokens S y that come back of their outputs y.

    And what autograd makes of A is S, to the bit: the backward pass sums in the order of the forward.
    """
    inputs = inputs_of(maps)
    outputs_mH: list[torch.Tensor] = []

    def any_rows(rank: int, tokens_mH: torch.Tensor, probs_m: torch.Tensor) -> torch.Tensor:
        outputs_mH.append(torch.rand_like(tokens_mH) - 0.5)
        return outputs_mH[-1]

    summed, seen = exchange(DeduplicatedDispatcher, inputs, any_rows)
    rows = [one.tokens_mH for one in seen]
    products = [(y * ax).sum() for y, ax in zip(outputs_mH, rows, strict=True)]
    others = [(sy * x).sum() for sy, x in zip(summed, inputs.hidden, strict=True)]
    assert torch.stack(products).sum().item() == pytest.approx(torch.stack(others).sum().item(), abs=1e-12)
    grads = torch.autograd.grad(rows, inputs.hidden, outputs_mH)
    assert all(map(torch.equal, grads, summed))


@pytest.mark.thorough
@given(worlds(), st.booleans(), st.integers(0, 3))
@example(ALL_DROPPED, False, 0)
@example(ONE_RANK_SENDS, True, 2)
def test_experts_see_the_rows_of_the_plain_dispatch(maps, last_expert_first, num_spare):
    """In content and order, to the bit; the sums differ in their order only."""
    inputs = inputs_of(maps)
    ours, ours_seen = exchange(DeduplicatedDispatcher, inputs, weighted, last_expert_first, num_spare)
    plain, plain_seen = exchange(AllToAllDispatcher, inputs, weighted, last_expert_first)
    for mine, theirs in zip(ours_seen, plain_seen, strict=True):
        assert mine.tokens_mH.equal(theirs.tokens_mH)
        assert mine.probs_m.equal(theirs.probs_m)
        assert mine.rows_per_expert == theirs.rows_per_expert
    for grads in zip(_results(ours, inputs), _results(plain, inputs), strict=True):
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def _results(outputs: list[torch.Tensor], inputs: Inputs) -> list[torch.Tensor]:
    """Outputs, and the gradients of a function of them."""
    loss = torch.stack([output.cos().sum() for output in outputs]).sum()
    return [*outputs, *torch.autograd.grad(loss, inputs.leaves)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_local", [1, 5, 8, 9, 16])
def test_choices_arrive_with_probabilities_of_every_type(num_local, dtype):
    """In every pattern of eight experts. On one rank's tokens all probabilities are zero, chosen or not."""
    patterns = torch.arange(256)[:, None].bitwise_right_shift(torch.arange(8)).bitwise_and(1).bool()
    chosen = patterns.repeat(1, 4)[:, : 2 * num_local]
    maps = [chosen, chosen.flip(0)]
    inputs = inputs_of(maps, dtype)
    with torch.no_grad():
        inputs.probs[0].zero_()
    _, seen = exchange(DeduplicatedDispatcher, inputs)
    map_tE, probs_tE, hidden_tH = torch.cat(maps), torch.cat(inputs.probs), torch.cat(inputs.hidden).squeeze(1)
    for rank, found in enumerate(seen):
        local = slice(rank * num_local, (rank + 1) * num_local)
        _, token_m = map_tE[:, local].t().nonzero(as_tuple=True)
        assert found.tokens_mH.equal(hidden_tH[token_m])
        assert found.probs_m.dtype is dtype
        assert found.probs_m.equal(probs_tE[:, local].t()[map_tE[:, local].t()])


@pytest.mark.parametrize("expert_tp_size", [1, 2])
def test_counts_are_distinct_rows_and_those_of_each_expert(expert_tp_size):
    """Also for each rank that holds a part of the experts."""
    comm = Comm(2 * expert_tp_size)
    dispatcher = DeduplicatedDispatcher(comm, 4, 2, group_of(expert_tp_size))
    map_tE = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    pending = dispatcher.launch_counts(None, map_tE, None)
    assert comm.counts[0].tolist() == [3, 2, 3] * expert_tp_size + [1, 1, 0] * expert_tp_size
    assert pending.num_sent() == 4


def test_no_value_is_needed_on_the_host():
    """A read of a value would raise here, and on a GPU it would wait for the device."""
    dispatcher = DeduplicatedDispatcher(Comm(2), 20, 2, group_of(1))
    hidden = torch.empty(5, 1, HIDDEN, device="meta", requires_grad=True)
    probs = torch.empty(5, 20, device="meta", requires_grad=True)
    map_tE = torch.empty(5, 20, dtype=torch.bool, device="meta")
    assert dispatcher._count(map_tE).shape == (2 * 11,)
    (tokens_dH, probs_d), rows = dispatcher.permute(hidden, probs, map_tE, 7)
    assert (tokens_dH.shape, probs_d.shape) == ((7, HIDDEN), (7, 12))
    routes = SimpleNamespace(rows_per_expert=torch.full((10,), 2))
    output_dH = dispatcher.through_experts(partial(weighted, 0), tokens_dH, probs_d, routes, last_expert_first=True)
    dispatcher.unpermute(output_dH, rows).sum().backward()
    assert (hidden.grad.shape, probs.grad.shape) == (hidden.shape, probs.shape)
