"""Two hops between all ranks of a world, in one process: against a dense computation, the plain dispatch, its adjoint.

Legend: N nodes, L ranks of the group on each, P = N * L ranks, V holders of an expert's parts, e local experts,
E = P * e, t tokens of a rank, m rows of a rank's experts, H hidden size. A world has P * V ranks, each with tokens of
its own; the V holders are neighbours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_lancet.features.two_hop.dispatcher import TwoHopDispatcher
from megatron_lancet.features.two_hop.routes import TwoHopRoutes
from megatron_lancet.model.dispatcher.row_order import RowOrder
from megatron_lancet.runtime.exchange import RowSplits
from megatron_lancet.schedule.nodes import Nodes
from tests.draws import examples
from tests.unit.model.dispatcher.simulated_ranks import HIDDEN, Comm, Inputs, Seen, group_of, inputs_of
from tests.unit.model.dispatcher.test_deduplicated import weighted

type Run = Callable[[int, torch.Tensor, torch.Tensor, list[int]], torch.Tensor]


@dataclass(frozen=True)
class World:
    """How many there are of each, and the choice [t, E] bool of each rank's tokens."""

    nodes: Nodes
    expert_tp_size: int
    num_local: int
    maps: list[torch.Tensor]

    @property
    def num_ranks(self) -> int:
        """P."""
        return self.nodes.num_nodes * self.nodes.ranks_per_node

    def experts_of(self, place: int) -> slice:
        """Those of a rank of the expert-parallel group."""
        return slice(place * self.num_local, (place + 1) * self.num_local)


@dataclass(frozen=True)
class Exchanged:
    """What came of a layer.

    Attributes:
        outputs: of each rank, [t, 1, H].
        seen: by its experts.
        routes: of each rank.
    """

    outputs: list[torch.Tensor]
    seen: list[Seen]
    routes: list[TwoHopRoutes]


def moved(
    rows: Sequence[tuple[torch.Tensor, ...]], splits: Sequence[RowSplits], peers: Sequence[list[int]]
) -> list[tuple[torch.Tensor, ...]]:
    """An all-to-all of all ranks, which must expect what is sent to them.

    Args:
        rows: those that each rank sends, and perhaps more.
        splits: by peer, of each rank.
        peers: the ranks that each one exchanges rows with.
    """
    parts = [
        [tensor[: sum(splits[rank].sent)].split(splits[rank].sent) for tensor in of_rank]
        for rank, of_rank in enumerate(rows)
    ]
    received = []
    for rank, sources in enumerate(peers):
        arrived = [[tensor[peers[source].index(rank)] for tensor in parts[source]] for source in sources]
        assert tuple(len(of_source[0]) for of_source in arrived) == splits[rank].received
        received.append(tuple(torch.cat(tensors) for tensors in zip(*arrived, strict=True)))
    return received


def two_hops(world: World, inputs: Inputs, run: Run, last_expert_first: bool = False, num_spare: int = 0) -> Exchanged:
    """Runs the layer on all ranks.

    Args:
        run: what a rank's experts make of rows, their probabilities and the number of rows of each.
        num_spare: rows that are made for the first hop and not sent.
    """
    num_all = len(world.maps)
    comm, holders = Comm(num_all), world.expert_tp_size
    dispatchers = [
        TwoHopDispatcher(
            comm,
            world.num_ranks * world.num_local,
            world.num_ranks,
            group_of(holders, rank % holders),
            world.nodes,
            rank // holders,
        )
        for rank in range(num_all)
    ]
    hops = [world.nodes.hops_of(rank, holders) for rank in range(num_all)]
    between, inside = ([hop[kind] for hop in hops] for kind in range(2))
    pending = [one.launch_counts(None, map_tE, None) for one, map_tE in zip(dispatchers, world.maps, strict=True)]
    num_sent = [one.num_sent() for one in pending]
    made = [
        one.permute(inputs.hidden[rank], inputs.probs[rank], inputs.maps[rank], num_sent[rank] + num_spare)
        for rank, one in enumerate(dispatchers)
    ]
    routes = [one.wait() for one in pending]
    assert num_sent == [sum(one.splits.sent) for one in routes]
    arrived = moved([rows for rows, _ in made], [one.splits for one in routes], between)
    passed = [one.pass_on(*of_rank) for one, *of_rank in zip(dispatchers, arrived, routes, strict=True)]
    local = moved([rows for rows, _ in passed], [one.local_splits for one in routes], inside)
    seen, outputs = [], []
    for rank, (one, its_routes) in enumerate(zip(dispatchers, routes, strict=True)):
        per_expert = its_routes.rows_per_expert.tolist()

        def keep(tokens_mH, probs_m, rank=rank, per_expert=per_expert):
            seen.append(Seen(tokens_mH, probs_m, per_expert))
            return run(rank, tokens_mH, probs_m, per_expert)

        tokens, probs = one.collect(local[rank], its_routes, last_expert_first)
        output = one.through_experts(keep, tokens, probs, its_routes, last_expert_first)
        outputs.append((one.sort_by_peer(output, its_routes, probs.dtype, last_expert_first),))
    returned = moved(outputs, [one.local_splits.reversed() for one in routes], inside)
    sums = [
        (one.sum_of_node(rows, rows_of),)
        for one, (rows,), (_, rows_of) in zip(dispatchers, returned, passed, strict=True)
    ]
    home = moved(sums, [one.splits.reversed() for one in routes], between)
    combined = [
        one.unpermute(rows, permutation) for one, (rows,), (_, permutation) in zip(dispatchers, home, made, strict=True)
    ]
    return Exchanged(combined, seen, routes)


@st.composite
def worlds(draw) -> World:
    """Of few ranks, with idle experts, ranks and nodes, dropped tokens, and all tokens on one rank or node."""
    nodes = Nodes(draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    expert_tp_size, num_local = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 9]))
    num_experts = nodes.num_nodes * nodes.ranks_per_node * num_local
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    topk = draw(st.integers(1, min(8, num_experts)))
    idle = torch.zeros(nodes.num_nodes, nodes.ranks_per_node, num_local, dtype=torch.bool)
    node, rank = draw(st.integers(0, nodes.num_nodes - 1)), draw(st.integers(0, nodes.ranks_per_node - 1))
    match draw(st.sampled_from(["busy", "idle rank", "idle node", "one rank", "one node", "idle expert"])):
        case "idle rank":
            idle[node, rank] = True
        case "idle node":
            idle[node] = True
        case "one rank":
            idle[:] = True
            idle[node, rank] = False
        case "one node":
            idle[:] = True
            idle[node] = False
        case "idle expert":
            idle[node, rank, 0] = True
    maps = []
    for _ in range(nodes.num_nodes * nodes.ranks_per_node * expert_tp_size):
        scores = torch.rand((draw(st.integers(1, 5)), num_experts), generator=generator)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(topk).indices, True)
        chosen[:, idle.flatten()] = False
        if draw(st.booleans()):  # a capacity drops some choices, and all of some tokens
            chosen &= torch.rand(chosen.shape, generator=generator) < 0.5
        maps.append(chosen)
    return World(nodes, expert_tp_size, num_local, maps)


ALL_DROPPED = World(Nodes(2, 2), 2, 2, [torch.zeros((3, 8), dtype=torch.bool)] * 8)
ONE_RANK_SENDS = World(
    Nodes(2, 2), 1, 1, [torch.ones((2, 4), dtype=torch.bool), *[torch.zeros((2, 4), dtype=torch.bool)] * 3]
)


def expert_of_rows(per_expert: Sequence[int], last_expert_first: bool) -> torch.Tensor:
    """The local expert of each row, [m]."""
    experts = torch.arange(len(per_expert)).repeat_interleave(torch.tensor(per_expert))
    return experts.flip(0) if last_expert_first else experts


def expected_rows(world: World, inputs: Inputs, rank: int, last_expert_first: bool) -> tuple[torch.Tensor, ...]:
    """Rows of a rank's experts in stock's order: by expert, there by holder, source rank and token."""
    experts = list(range(world.num_local))
    rows, probs = [torch.empty(0, HIDDEN)], [torch.empty(0)]
    for expert in experts[::-1] if last_expert_first else experts:
        for holder in range(world.expert_tp_size):
            for source in range(holder, len(world.maps), world.expert_tp_size):
                own = world.experts_of(rank // world.expert_tp_size).start + expert
                chosen = world.maps[source][:, own]
                rows.append(inputs.hidden[source].squeeze(1)[chosen])
                probs.append(inputs.probs[source][chosen, own])
    return torch.cat(rows), torch.cat(probs)


@pytest.mark.thorough
@given(worlds(), st.booleans(), st.integers(0, 2))
@example(ALL_DROPPED, False, 0)
@example(ONE_RANK_SENDS, True, 2)
@examples(60)
def test_two_hops_compute_what_every_expert_on_every_token_does(world, last_expert_first, num_spare):
    """Experts see their rows to the bit and in stock's order; sums differ in their order only, gradients too."""
    inputs = inputs_of(world.maps)
    num_experts = world.num_ranks * world.num_local
    # Each expert and each of its holders has a factor of its own: what another has computed would be seen.
    factors_EV = torch.rand(num_experts, world.expert_tp_size, dtype=torch.float64) + 0.5

    def run(rank: int, tokens_mH: torch.Tensor, probs_m: torch.Tensor, per_expert: list[int]) -> torch.Tensor:
        place, holder = divmod(rank, world.expert_tp_size)
        factor_e = factors_EV[world.experts_of(place), holder]
        return tokens_mH.sin() * (probs_m * factor_e[expert_of_rows(per_expert, last_expert_first)])[:, None]

    found = two_hops(world, inputs, run, last_expert_first, num_spare)
    for rank, seen in enumerate(found.seen):
        tokens, probs = expected_rows(world, inputs, rank, last_expert_first)
        assert seen.tokens_mH.equal(tokens)
        assert seen.probs_m.equal(probs)
    dense = [
        hidden.sin() * (probs * map_tE * factors_EV.sum(dim=1)).sum(dim=1)[:, None, None]
        for hidden, probs, map_tE in zip(inputs.hidden, inputs.probs, inputs.maps, strict=True)
    ]
    for mine, theirs in zip(results(found.outputs, inputs), results(dense, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def results(outputs: list[torch.Tensor], inputs: Inputs) -> list[torch.Tensor]:
    """Outputs, and the gradients of a function of them. Those of probabilities that nobody chose are not compared."""
    loss = torch.stack([output.cos().sum() for output in outputs]).sum()
    grads = torch.autograd.grad(loss, inputs.leaves)
    of_probs = [grad * map_tE for grad, map_tE in zip(grads[len(inputs.hidden) :], inputs.maps, strict=True)]
    return [*outputs, *grads[: len(inputs.hidden)], *of_probs]


@pytest.mark.thorough
@given(worlds())
@example(ALL_DROPPED)
@example(ONE_RANK_SENDS)
@examples(50)
def test_sums_of_two_hops_are_the_adjoint_of_their_copies(world):
    """<y, A x> = <S y, x> for the rows A x that experts see, and the tokens S y that come back of their outputs y.

    What autograd makes of A is S; without holders to the bit, because the backward sums in the order of the forward.
    """
    inputs, outputs_mH = inputs_of(world.maps), []

    def any_rows(rank: int, tokens_mH: torch.Tensor, probs_m: torch.Tensor, per_expert: list[int]) -> torch.Tensor:
        outputs_mH.append(torch.rand_like(tokens_mH) - 0.5)
        return outputs_mH[-1]

    found = two_hops(world, inputs, any_rows)
    rows = [one.tokens_mH for one in found.seen]
    products = [(y * ax).sum() for y, ax in zip(outputs_mH, rows, strict=True)]
    others = [(sy * x).sum() for sy, x in zip(found.outputs, inputs.hidden, strict=True)]
    assert torch.stack(products).sum().item() == pytest.approx(torch.stack(others).sum().item(), abs=1e-12)
    grads = torch.autograd.grad(rows, inputs.hidden, outputs_mH)
    for grad, summed in zip(grads, found.outputs, strict=True):
        if world.expert_tp_size == 1:
            assert grad.equal(summed)
        else:
            torch.testing.assert_close(grad, summed, rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
@given(worlds())
@example(ALL_DROPPED)
@examples(50)
def test_routes_of_all_ranks_are_the_rows_of_the_choice(world):
    """Computed from all choices at once; that one rank receives what another sends is checked where rows move."""
    inputs = inputs_of(world.maps)
    found = two_hops(world, inputs, lambda rank, tokens_mH, probs_m, per_expert: tokens_mH)
    nodes, holders = world.nodes, world.expert_tp_size
    per_node = nodes.ranks_per_node * holders
    goes = [map_tE.view(-1, nodes.num_nodes, nodes.ranks_per_node, world.num_local) for map_tE in world.maps]
    for rank, routes in enumerate(found.routes):
        place, holder = divmod(rank, holders)
        node, local = divmod(place, nodes.ranks_per_node)
        assert routes.splits.sent == tuple(goes[rank].flatten(2).any(dim=2).sum(dim=0).tolist())
        to_here = [goes_tNLe[:, node, local].any(dim=1).sum() for goes_tNLe in goes]
        rows_LVN = torch.stack(to_here).view(nodes.num_nodes, nodes.ranks_per_node, holders).permute(1, 2, 0)
        assert routes.rows_by_way.equal(rows_LVN)
        assert routes.local_splits.received == tuple(rows_LVN.sum(dim=2).flatten().tolist())
        passed_on = torch.zeros(nodes.ranks_per_node, dtype=torch.long)
        for way in range(rank % per_node, len(goes), per_node):
            passed_on = passed_on + goes[way][:, node].any(dim=2).sum(dim=0)
        assert routes.local_splits.sent == tuple(passed_on.repeat_interleave(holders).tolist())
        chosen_e = torch.stack([goes_tNLe[:, node, local].sum(dim=0) for goes_tNLe in goes])
        assert routes.rows_per_expert.equal(chosen_e.sum(dim=0))
        assert routes.num_rows == int(chosen_e[holder::holders].sum())


@given(st.lists(st.integers(0, 3), min_size=24, max_size=24), st.permutations(range(3)))
@examples(40)
def test_order_by_other_dimensions_is_that_of_a_stable_sort(sizes, dims):
    sizes_abc = torch.tensor(sizes).view(2, 3, 4)
    parts = sizes_abc.nonzero().repeat_interleave(sizes_abc[sizes_abc > 0], dim=0)  # [m, 3], the part of each row
    order = RowOrder.of_parts(sizes_abc, lambda values: values.permute(*dims), len(parts))
    keys = [tuple(parts[row, list(dims)].tolist()) for row in range(len(parts))]
    assert order.index_m.tolist() == sorted(range(len(parts)), key=keys.__getitem__)
    assert order.undo(order.apply(parts)).equal(parts)


@pytest.mark.parametrize("expert_tp_size", [1, 2])
def test_no_value_is_needed_on_the_host(expert_tp_size):
    """A read of a value would raise here, and on a GPU it would wait for the device."""
    dispatcher = TwoHopDispatcher(Comm(4), 40, 4, group_of(expert_tp_size), Nodes(2, 2), 0)
    hidden = torch.empty(5, 1, HIDDEN, device="meta", requires_grad=True)
    probs = torch.empty(5, 40, device="meta", requires_grad=True)
    map_tE = torch.empty(5, 40, dtype=torch.bool, device="meta")
    assert dispatcher._count(map_tE).shape == (4 * expert_tp_size * (2 + 2 + 10),)
    rows, permutation = dispatcher.permute(hidden, probs, map_tE, 7)
    num_local = 9 * expert_tp_size
    routes = SimpleNamespace(
        local_splits=RowSplits((num_local,), (num_local,)),
        rows_by_way=torch.empty(2, expert_tp_size, 2, dtype=torch.long, device="meta"),
        rows_per_expert=torch.full((10,), 2),
    )
    (tokens, choice), passed = dispatcher.pass_on(rows, routes)
    assert (tokens.shape, choice.shape) == ((num_local, HIDDEN), (num_local, 12))
    output = dispatcher.through_experts(partial(weighted, 0), tokens, choice, routes)
    summed = dispatcher.sum_of_node(output, passed)
    assert summed.shape == (7, HIDDEN)
    dispatcher.unpermute(summed, permutation).sum().backward()
    assert (hidden.grad.shape, probs.grad.shape) == (hidden.shape, probs.shape)
