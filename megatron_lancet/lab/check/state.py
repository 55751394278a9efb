"""Weights and gradients of a model as full tensors, cut and put together as Megatron's checkpoints do it.

So there is no rule for any parameter here: what a rank holds of a tensor, and which ranks hold the same, is what
``sharded_state_dict`` of its modules says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.utils import unwrap_model
from megatron.training import get_args
from megatron.training.checkpointing import _build_sharded_state_dict_metadata

_SPREAD = 0.02
"""Standard deviation of what is added to initial weights: zeros and ones would hide errors."""


@dataclass(frozen=True)
class Shard:
    """A part of a tensor on one rank.

    Attributes:
        key: of the tensor in a checkpoint. Layers of equal shape may be one tensor.
        where: index of the part.
    """

    key: str
    shape: tuple[int, ...]
    where: tuple[int | slice, ...]
    values: torch.Tensor


def shards(model: Sequence[torch.nn.Module]) -> Iterator[Shard]:
    """Yields what this rank has of each parameter and buffer of its stages; ``values`` share its memory."""
    metadata = _build_sharded_state_dict_metadata(get_args())
    for stage in unwrap_model(list(model)):  # DDP has a list with the name of the method buffers()
        memory = {tensor.untyped_storage().data_ptr() for tensor in (*stage.parameters(), *stage.buffers())}
        state = stage.sharded_state_dict(metadata=metadata)
        apply_factories(state)
        for part in nested_values(state):
            if not isinstance(part, ShardedTensor):
                continue
            assert part.data is not None
            values = part.data.detach()
            assert values.untyped_storage().data_ptr() in memory, f"{part.key} is not a part of the model's memory"
            yield Shard(part.key, tuple(part.global_shape), part.global_slice(), values)


def spread_weights(model: Sequence[torch.nn.Module]) -> None:
    """Moves each parameter away from its initial value by a random amount, on the one rank of a reference."""
    generator = torch.Generator().manual_seed(7)
    for stage in model:
        for parameter in stage.parameters():
            parameter.data.add_(_SPREAD * torch.randn(parameter.shape, generator=generator))


def save_full(model: Sequence[torch.nn.Module], file: Path) -> None:
    """Writes the full model of the one rank of a reference."""
    full: dict[str, torch.Tensor] = {}
    for shard in shards(model):
        tensor = full.setdefault(shard.key, torch.zeros(shard.shape, dtype=shard.values.dtype))
        tensor[shard.where] = shard.values
    torch.save(full, file)


def load_full(model: Sequence[torch.nn.Module], file: Path) -> None:
    """Gives this rank its parts of a model that :func:`save_full` wrote."""
    full = torch.load(file, weights_only=True)
    for shard in shards(model):
        shard.values.copy_(full[shard.key][shard.where])


def keep_gradients_as_weights(model: Sequence[torch.nn.Module]) -> None:
    """Overwrites each weight by its gradient, to be saved like a weight; the model is of no use afterwards."""
    for stage in model:
        _complete_reductions(stage)
        for parameter in stage.parameters():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is None or not parameter.requires_grad:
                parameter.data.zero_()
            else:
                parameter.data.copy_(gradient)


def _complete_reductions(stage: Any) -> None:
    """Gathers the parts of gradients that the ranks of a distributed optimizer have reduced."""
    if not stage.ddp_config.use_distributed_optimizer:
        return
    for buffer in stage.buffers + stage.expert_parallel_buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def save_shards(model: Sequence[torch.nn.Module], file: Path) -> None:
    """Writes this rank's parts of the model."""
    found = [(shard.key, shard.shape, _bounds(shard), shard.values.clone()) for shard in shards(model)]
    torch.save(found, file)


def _bounds(shard: Shard) -> list[tuple[int, int]]:
    """Start and end of the part along each axis of the tensor."""
    return [(one.start, one.stop) if isinstance(one, slice) else (one, one + 1) for one in shard.where]
