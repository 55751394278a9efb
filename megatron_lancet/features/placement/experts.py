"""Modules of local experts that may be any of the layer's: their tensors by slot, their names in checkpoints.

Megatron numbers the experts of a rank from its rank on. In a checkpoint they keep the numbers of the model, whichever
rank holds them, so that it can be loaded under any placement, and by stock.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from megatron_lancet.errors import UsageError
from megatron_lancet.features.placement.slots import Slots

_NAMES = re.compile(r"local_experts\.(\d+)\.(.+)|(linear_fc[12]\.(?:weight|bias))(\d+)")
"""Parameters of sequential experts, and of Transformer Engine's grouped ones."""


class PlacedExperts(MegatronModule):
    """Base of modules of local experts.

    Attributes:
        slots: where the layer's experts are.
    """

    slots: Slots

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Megatron's, with the experts' own numbers."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return numbered_as_in_model(state, self.slots, len(sharded_offsets), metadata)


@cache
def placed(kind: type[torch.nn.Module]) -> type[PlacedExperts]:
    """The subclass of a class of local experts whose experts may be any of the layer's."""
    assert issubclass(kind, TEGroupedMLP | SequentialMLP), kind
    return type(f"Placed{kind.__name__}", (PlacedExperts, kind), {})


def numbered_as_in_model(
    state: dict[str, Any], slots: Slots, axis: int, metadata: dict[str, Any] | None
) -> dict[str, Any]:
    """Gives the parts of a sharded state the logical numbers of their experts, in place.

    Args:
        state: Megatron's, whose parts have the numbers of slots.
        axis: dimension of the experts in the global tensors.
        metadata: of Megatron's checkpoint.
    """
    assert not (metadata or {}).get("singleton_local_shards", False), "names of experts in keys are not known here"
    experts = slots.experts

    def renumber(part: Any) -> Any:
        if isinstance(part, ShardedTensor | ShardedObject):
            offset = list(part.global_offset)
            offset[axis] = experts[offset[axis]]
            part.global_offset = tuple(offset)
        elif isinstance(part, ShardedTensorFactory):
            build = part.build_fn
            part.build_fn = lambda *args: dict_list_map_outplace(renumber, build(*args))
        return part

    for part in state.values():
        renumber(part)
    return state


def parameters_of_slots(experts: torch.nn.Module) -> list[list[torch.nn.Parameter]]:
    """The parameters of each local expert; of all experts in the same order.

    Raises:
        UsageError: a parameter belongs to several experts.
    """
    found: defaultdict[int, dict[str, torch.nn.Parameter]] = defaultdict(dict)
    for name, parameter in experts.named_parameters():
        match = _NAMES.fullmatch(name)
        if match is None:
            raise UsageError(
                f"--lancet-expert-placement moves the weights of single experts, and {name} is not one expert's. Drop "
                "the flag."
            )
        slot, within = (match[1], match[2]) if match[1] is not None else (match[4], match[3])
        found[int(slot)][within] = parameter
    return [[found[slot][name] for name in sorted(found[slot])] for slot in sorted(found)]


def exchange(
    tensors_of: Sequence[Sequence[torch.Tensor]],
    before: Sequence[int],
    after: Sequence[int],
    group: torch.distributed.ProcessGroup,
) -> None:
    """Moves experts to other slots, directly from rank to rank, by one message. Collective over ``group``.

    Args:
        tensors_of: tensors of each local slot, with the same shapes and types for all slots.
        before: expert of each slot of the group.
        after: expert of each slot afterwards.
    """
    num_ranks, rank = group.size(), group.rank()
    per_rank = len(before) // num_ranks
    source = {expert: slot for slot, expert in enumerate(before)}
    moves = [(source[expert], slot) for slot, expert in enumerate(after) if before[slot] != expert]
    if not moves:
        return
    size = sum(tensor.nbytes for tensor in tensors_of[0])
    sends: list[list[int]] = [[] for _ in range(num_ranks)]
    receives: list[list[int]] = [[] for _ in range(num_ranks)]
    for old, new in moves:  # both ends of a message list its experts in the order of their new slots
        if old // per_rank == rank:
            sends[new // per_rank].append(old % per_rank)
        if new // per_rank == rank:
            receives[old // per_rank].append(new % per_rank)
    sent = [_as_bytes(tensors_of[slot]) for to_rank in sends for slot in to_rank]
    like = tensors_of[0][0]
    outgoing = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8, device=like.device)
    arrived = outgoing.new_empty(size * sum(map(len, receives)))
    torch.distributed.all_to_all_single(
        arrived, outgoing, [size * len(one) for one in receives], [size * len(one) for one in sends], group=group
    )
    arriving = (slot for from_rank in receives for slot in from_rank)
    for slot, content in zip(arriving, arrived.split(size) if len(arrived) else (), strict=True):
        _fill(tensors_of[slot], content)


def _as_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def _fill(tensors: Sequence[torch.Tensor], content: torch.Tensor) -> None:
    with torch.no_grad():
        for tensor, part in zip(tensors, content.split([tensor.nbytes for tensor in tensors]), strict=True):
            aligned = part.clone() if part.data_ptr() % tensor.element_size() else part
            tensor.copy_(aligned.view(tensor.dtype).view(tensor.shape))
