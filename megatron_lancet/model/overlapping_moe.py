"""The experts of a layer that Megatron built, prepared for chunks."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_lancet.model.adopt import ByPlan
from megatron_lancet.model.dispatcher.base import Dispatcher
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.model.recompute import NOTHING, Recompute
from megatron_lancet.model.routing.router import ChunkedTopKRouter
from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.exchange import PendingSplits, RowSplits
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.plan import Dispatch
from megatron_lancet.schedule.turns import Verb


@dataclass(frozen=True)
class OverlappingMoE:
    """The experts of a layer that Megatron built, prepared for chunks.

    Attributes:
        number: number of its layer.
        stock: Megatron's module.
        dispatchers: move rows between tokens' ranks and experts' ranks.
        comm: all-to-alls of the model.
        recompute: which ops are recomputed in the backward pass.
    """

    number: int
    stock: MoELayer
    dispatchers: Mapping[Dispatch, Dispatcher]
    comm: Comm
    recompute: Recompute = NOTHING

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher of the present plan."""
        assert self.comm.settings.dispatch in self.dispatchers, "nothing was prepared for this dispatch"
        return self.dispatchers[self.comm.settings.dispatch]

    @property
    def local_experts(self) -> Sequence[int]:
        """Numbers of the experts of this rank, in the order of their slots."""
        router = self.stock.router
        if isinstance(router, ChunkedTopKRouter) and router.local_experts is not None:
            return router.local_experts
        num_local, rank = self.stock.num_local_experts, self.stock.token_dispatcher.ep_group.rank()
        return range(num_local * rank, num_local * (rank + 1))

    @property
    def last_expert_first(self) -> bool:
        """Whether the next forward pass of the experts expects the last one's rows first."""
        experts = self.stock.experts
        return isinstance(experts, ByPlan) and experts.last_expert_first

    @cached_property
    def expert_of(self) -> Mapping[Hashable, int]:
        """The local expert of each module of the experts that run one after the other."""
        experts = getattr(self.stock.experts, "local_experts", ())
        return {module: slot for slot, expert in enumerate(experts) for module in expert.modules()}

    def op(self, kind: OpKind, x: ChunkState, tile: int | None = None) -> Op:
        """The op of a kind on a chunk in this layer.

        Args:
            tile: the part of the chunk's rows that it is for; None for all of them.
        """
        return Op(self.number, x.chunk.index, Phase.FORWARD, kind, tile)

    def all_to_all(self, kind: OpKind, x: ChunkState, splits: RowSplits | PendingSplits) -> AllToAll:
        """The message of a kind that a chunk sends in this layer."""
        return AllToAll(self.comm, self.op(kind, x), splits)


type ForwardOp = Callable[[OverlappingMoE, ChunkState], None]
"""Runs one verb of a layer with experts on a chunk."""

type ForwardOps = Mapping[Verb, ForwardOp]
