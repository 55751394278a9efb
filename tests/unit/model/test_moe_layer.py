"""The ops of a MoE layer on one chunk, in a mocked world of two ranks with two experts each."""

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lancet.features.dedup.dispatcher import DeduplicatedDispatcher
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.dispatcher import TwoHopDispatcher
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.model import moe_layer
from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.model.overlapping_moe import OverlappingMoE
from megatron_lancet.model.recompute import Recompute
from megatron_lancet.runtime.comm import Comm, CommSettings
from megatron_lancet.runtime.trace import RoutedRows, Trace
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.runtime.transport.select import make_transport
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.turns import Compute, Layer, verbs_of
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_world import mock_world
from tests.fakes import cpu_stats

NUM_RANKS, NUM_EXPERTS, HIDDEN, TOPK = 2, 4, 8, 2


@pytest.fixture
def comm() -> Iterator[Comm]:
    with mock_world(NUM_RANKS, Link()):
        stats, world = cpu_stats(), dist.group.WORLD
        yield Comm(make_transport(world, world, torch.device("cpu"), stats, timedelta(minutes=1)), None, stats, 0)


class Experts:
    """Multiplies rows by their probability, and keeps what was alive when it ran."""

    def __init__(self) -> None:
        self.arrived: StorageWeakRef | None = None
        self.arrived_was_free: list[bool] = []

    def __call__(self, tokens_mH, rows_per_expert, probs_m):
        assert self.arrived is not None
        self.arrived_was_free.append(self.arrived.expired())
        assert int(rows_per_expert.sum()) == len(tokens_mH)
        return tokens_mH * probs_m[:, None], None


def moe_of(comm: Comm, experts: Experts, recompute: Recompute, **config) -> OverlappingMoE:
    config = {
        "num_moe_experts": NUM_EXPERTS,
        "moe_router_topk": TOPK,
        "moe_expert_capacity_factor": None,
        "fp8": None,
        "fp4": None,
        **config,
    }
    stock = SimpleNamespace(
        experts=experts,
        router=SimpleNamespace(num_experts=NUM_EXPERTS),
        use_shared_expert=False,
        is_mtp_layer=False,
        layer_number=1,
        num_local_experts=NUM_EXPERTS // NUM_RANKS,
        config=SimpleNamespace(**config),
    )
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    dispatchers = {
        PLAIN: AllToAllDispatcher(comm, NUM_EXPERTS, NUM_RANKS, alone),
        DEDUP: DeduplicatedDispatcher(comm, NUM_EXPERTS, NUM_RANKS, alone),
        TWO_HOP: TwoHopDispatcher(comm, NUM_EXPERTS, NUM_RANKS, alone, Nodes(2, 1), rank=0),
    }
    return OverlappingMoE(1, stock, dispatchers, comm, recompute)


def routed_chunk() -> ChunkState:
    """Three tokens, of which each goes to two experts."""
    x = ChunkState(Chunk(0, 1))
    x.normed_sbH = torch.randn(3, 1, HIDDEN, requires_grad=True)
    x.routing_map_tE = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]).bool()
    x.probs_tE = (x.routing_map_tE * 0.5).requires_grad_()
    x.routed = ReadyEvent(x.routing_map_tE)
    return x


def forward(moe: OverlappingMoE, x: ChunkState, verbs: Layer) -> None:
    """Runs a layer's ops behind the router."""
    for verb in verbs[verbs.index(Compute(OpKind.ROUTE)) + 1 :]:
        if verb in moe_layer.OPS:
            moe_layer.OPS[verb](moe, x)


@pytest.mark.parametrize("recompute", [Recompute(), Recompute(experts=True)], ids=["kept", "recomputed"])
def test_rows_are_freed_when_packed_and_when_sorted(comm, recompute):
    experts = Experts()
    moe, x = moe_of(comm, experts, recompute), routed_chunk()
    hidden_sbH, probs_tE = x.normed_sbH, x.probs_tE
    moe_layer.launch_counts(moe, x)
    moe_layer.preprocess(moe, x)
    permuted = [StorageWeakRef(rows.untyped_storage()) for rows in x.rows]
    assert not any(rows.expired() for rows in permuted)
    moe_layer.launch_dispatch(moe, x)
    assert all(rows.expired() for rows in permuted)
    moe_layer.wait_for_rows(moe, x)
    experts.arrived = StorageWeakRef(x.rows[0].untyped_storage())
    assert not experts.arrived.expired()
    moe_layer.experts(moe, x)
    assert experts.arrived_was_free == [True]
    moe_layer.launch_combine(moe, x)
    moe_layer.wait_for_rows(moe, x)
    moe_layer.postprocess(moe, x)
    assert torch.allclose(x.output_sbH, hidden_sbH)  # each of two experts takes a half
    x.output_sbH.sum().backward()
    assert torch.allclose(hidden_sbH.grad, torch.ones(3, 1, HIDDEN))
    assert torch.allclose(probs_tE.grad, hidden_sbH.sum(dim=2) * (probs_tE > 0))


@pytest.mark.parametrize("dispatch", list(Dispatch.known().values()))
def test_trace_has_rows_with_and_without_duplicates(comm, dispatch):
    """The first token has both of its experts on rank 0, the others one on each rank."""
    moe, x, trace = moe_of(comm, Experts(), Recompute()), routed_chunk(), Trace(torch.device("cpu"), 0)
    comm.use(CommSettings(dispatch))
    comm.record_to(trace)
    moe_layer.launch_counts(moe, x)
    moe_layer.preprocess(moe, x)
    assert len(x.rows[0]) == (6 if dispatch is PLAIN else 5)
    assert trace.end_step().routed == {"L1.c0.F.experts": RoutedRows(rows=(4, 2), tokens=(3, 2))}


class KeepingExperts:
    """Square rows, for which autograd keeps them, and know whether the rows of any call are in memory."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._rows: list[StorageWeakRef] = []

    def __call__(self, tokens_mH, rows_per_expert, probs_m):
        self.num_calls += 1
        output_mH = tokens_mH.square() * probs_m[:, None]
        self._rows += [StorageWeakRef(rows.untyped_storage()) for rows in (tokens_mH, output_mH)]
        return output_mH, None

    @property
    def rows_in_memory(self) -> list[bool]:
        """Of each call's tokens, then of its output."""
        return [not rows.expired() for rows in self._rows]


@pytest.mark.parametrize("recomputed", [False, True])
def test_deduplicated_rows_are_recomputed_and_not_kept(comm, recomputed):
    """With recompute the distinct rows are kept, as they were received; else what autograd keeps of the experts."""
    comm.use(CommSettings(DEDUP))
    experts = KeepingExperts()
    moe, x = moe_of(comm, experts, Recompute(experts=recomputed)), routed_chunk()
    hidden_sbH = x.normed_sbH
    received = []  # by the experts, and by the tokens' rank
    for verb in verbs_of(LayerKind.MOE, has_shared_experts=False):
        if verb in (Compute(OpKind.EXPERTS), Compute(OpKind.POSTPROCESS)):
            received.append(StorageWeakRef(x.rows[0].untyped_storage()))
            assert len(x.rows[0]) == 5  # of six choices two are on one rank
        if verb in moe_layer.OPS and verb != Compute(OpKind.ROUTE):
            moe_layer.OPS[verb](moe, x)
    assert experts.rows_in_memory == [not recomputed, False]
    assert [rows.expired() for rows in received] == [not recomputed, True]
    assert torch.allclose(x.output_sbH, hidden_sbH.square())  # each of two experts takes a half
    x.output_sbH.sum().backward()
    assert experts.num_calls == 1 + recomputed
    assert not any(experts.rows_in_memory)
    assert torch.allclose(hidden_sbH.grad, 2 * hidden_sbH)


def test_padded_experts_get_their_rows_without_counts(comm, monkeypatch):
    """Two rows of each expert: a token that did not choose it has the weight zero."""
    monkeypatch.setattr(Experts, "__call__", lambda _, tokens, rows, probs: (tokens * probs[:, None], None))
    launched = []
    monkeypatch.setattr(Comm, "launch_counts", lambda *_: launched.append("counts"))
    moe = moe_of(comm, Experts(), Recompute(), moe_expert_capacity_factor=1.3)
    x = routed_chunk()
    x.routing_map_tE = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 1]]).bool()
    hidden_sbH, weights_tE = x.normed_sbH, x.probs_tE.detach()
    forward(moe, x, verbs_of(LayerKind.MOE, has_shared_experts=False, pads_to_capacity=True))
    assert launched == []
    assert torch.allclose(x.output_sbH.squeeze(1), hidden_sbH.squeeze(1) * weights_tE.sum(1)[:, None])


def test_capacity_larger_than_micro_batch_is_that_of_all_tokens(comm):
    moe = moe_of(comm, Experts(), Recompute(), moe_expert_capacity_factor=100.0)
    assert moe_layer._capacity(moe.stock, num_tokens=3) == 3


def test_rows_of_dropped_tokens_are_counted_without_the_map(comm):
    moe, x = moe_of(comm, Experts(), Recompute(), moe_expert_capacity_factor=0.5), routed_chunk()
    moe_layer.launch_counts(moe, x)
    x.routing_map_tE = torch.empty(3, NUM_EXPERTS, device="meta")  # no value of it can be read
    assert moe.dispatcher.num_rows(x.probs_tE, TOPK, True, x.routes) == 6
