"""Runs a loaded model with replicas of popular experts.

Megatron's MoE layer keeps its router, its experts' weights and its all-to-alls. Next to its own experts a rank gets
copies of others' weights, the layer's dispatcher counts slots instead of experts, and a hook behind the router turns
the columns of experts into columns of slots (``planning/load/replicas.py`` has the rule). A token's output is the same
sum of the same experts' outputs; a GEMM over another number of rows may round its last bit differently.

Legend of shapes: t tokens of a batch on a rank, E experts, Q slots of all ranks.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lancet.errors import UsageError
from megatron_lancet.inference.load import LoadedModel
from megatron_lancet.planning.load.replicas import ExpertHolders, holders_in_turn

FLAG = "--replicas"


@dataclass(frozen=True)
class _Assignment:
    """Where a rank's tokens go in one layer.

    Attributes:
        source: the rank.
        slots_EW: slots of the holders that take turns, filled up with the first one.
        num_in_turn_E: how many these are.
        num_slots: Q.
    """

    source: int
    slots_EW: torch.Tensor
    num_in_turn_E: torch.Tensor
    num_slots: int

    @staticmethod
    def of(holders: ExpertHolders, source: int, ranks_per_node: int | None, device: torch.device) -> "_Assignment":
        in_turn = holders_in_turn(holders, source, ranks_per_node)
        width = max(map(len, in_turn))
        slots = [
            [holders.slot(expert, rank) for rank in (*ranks, *[ranks[0]] * (width - len(ranks)))]
            for expert, ranks in enumerate(in_turn)
        ]
        return _Assignment(
            source,
            torch.tensor(slots, device=device),
            torch.tensor(list(map(len, in_turn)), device=device),
            holders.num_ranks * holders.slots_per_rank,
        )

    def __call__(self, _router: Any, _inputs: Any, outputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
        """A forward hook of the router: columns of experts, [t, E] each, become columns of slots, [t, Q] each."""
        probs_tE, map_tE = outputs
        # The token's number among those that chose the expert, as planning.load.replicas.holder_of counts.
        number_tE = map_tE.long().cumsum(0) - 1
        turn_tE = (number_tE + self.source) % self.num_in_turn_E
        slot_tE = self.slots_EW.expand(len(map_tE), -1, -1).gather(2, turn_tE[:, :, None])[:, :, 0]
        return tuple(
            column_tE.new_zeros(len(column_tE), self.num_slots).scatter(1, slot_tE, column_tE)
            for column_tE in (probs_tE, map_tE)
        )


@dataclass
class _Layer:
    """A layer with the parts that it needs for replicas."""

    moe: MoELayer
    assignment: _Assignment
    dispatcher: MoEAlltoAllTokenDispatcher
    copies: list[torch.nn.Module]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the layer runs with its replicas."""
        experts, stock = self.moe.experts, self.moe.token_dispatcher
        own = list(experts.local_experts)
        hook = self.moe.router.register_forward_hook(self.assignment)
        experts.local_experts = torch.nn.ModuleList([*own, *self.copies])
        experts.num_local_experts, self.moe.token_dispatcher = len(own) + len(self.copies), self.dispatcher
        try:
            yield
        finally:
            experts.local_experts = torch.nn.ModuleList(own)
            experts.num_local_experts, self.moe.token_dispatcher = len(own), stock
            hook.remove()


@dataclass
class Replicas:
    """Replicas of a model's experts; off until :meth:`active`.

    Attributes:
        num_bytes: of weights that a rank holds for them.
    """

    num_bytes: int
    _layers: list[_Layer] = field(repr=False)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the model runs with its replicas. On all ranks alike, between batches."""
        with ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(layer.active())
            yield


def make_replicas(model: LoadedModel, holders: Mapping[int, ExpertHolders], ranks_per_node: int | None) -> Replicas:
    """Copy experts' weights to the ranks that are to hold replicas. Collective: all ranks with the same arguments.

    Args:
        holders: by layer number.
        ranks_per_node: None where it is unknown.

    Raises:
        UsageError: the model's experts are of a kind that can't be copied one by one.
    """
    layers = []
    for moe in moe_layers(model):
        if type(moe.experts) is not SequentialMLP:
            raise UsageError(
                f"{FLAG} needs experts that are modules of their own (Megatron's SequentialMLP), and this model has "
                f"{type(moe.experts).__name__}. Drop it."
            )
        layers.append(_prepared(moe, holders[moe.layer_number], model, ranks_per_node))
    num_bytes = sum(
        weight.numel() * weight.element_size()
        for layer in layers
        for expert in layer.copies
        for weight in expert.parameters()
    )
    return Replicas(num_bytes, layers)


def moe_layers(model: LoadedModel) -> list[Any]:
    """The layers with experts, in order."""
    return [module for module in model.module.modules() if isinstance(module, MoELayer)]


def _prepared(moe: Any, holders: ExpertHolders, model: LoadedModel, ranks_per_node: int | None) -> _Layer:
    config = copy.copy(moe.config)
    config.num_moe_experts = holders.num_ranks * holders.slots_per_rank
    first = model.rank * holders.slots_per_rank
    slots = list(range(first, first + holders.slots_per_rank))
    dispatcher = type(moe.token_dispatcher)(len(slots), slots, config, get_default_pg_collection())
    assignment = _Assignment.of(holders, model.rank, ranks_per_node, model.device)
    return _Layer(moe, assignment, dispatcher, _copies(moe.experts.local_experts, holders, model.rank))


@torch.no_grad()
def _copies(own: torch.nn.ModuleList, holders: ExpertHolders, rank: int) -> list[torch.nn.Module]:
    """Returns this rank's replicas.

    Every expert is sent from its home rank to its replicas' ranks, one after the other.
    """
    received = []
    for holder, experts in enumerate(holders.replicas):
        for expert in experts:
            home = holders.home(expert)
            if rank == home:
                for value in _values_of(own[expert % len(own)]):
                    dist.send(value.contiguous(), holder)
            elif rank == holder:
                replica = _copy_of(own[0])
                for value in _values_of(replica):
                    dist.recv(value, home)
                received.append(replica)
    return received


def _values_of(expert: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers, which are on the device; a state dict may also have tensors of the host."""
    yield from (*expert.parameters(), *expert.buffers())


def _copy_of(expert: torch.nn.Module) -> torch.nn.Module:
    """Returns an expert with parameters of its own, in the same process groups and of the same configuration."""
    shared = {
        id(value): value
        for module in expert.modules()
        for value in vars(module).values()
        if isinstance(value, dist.ProcessGroup | TransformerConfig)
    }
    return copy.deepcopy(expert, shared)
