"""Checks attention masks where attention does not read all of them.

Sequence chunks attend to all earlier positions and no later ones, and take no mask. With context parallelism, a slice
of the sequence attends to no later position. Megatron passes a mask with each micro-batch. Each limit is checked on one
mask only, because the check makes the host wait for the device.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from enum import Enum
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megatron_lancet.errors import UsageError
from megatron_lancet.model.attention.sdpa import SdpaAttention
from megatron_lancet.model.attention.slices import own_positions
from megatron_lancet.schedule.plan import ChunkDim, Segment

_PIECE = 2**24
"""Mask entries compared at a time."""


class MaskLimit(Enum):
    """A limit on masks; the value describes it in errors."""

    CAUSAL = "sequence chunks attend to all earlier positions and no later ones"
    NO_LATER = "local layers with --context-parallel-size attend to no later positions"


_ADVICE = {MaskLimit.CAUSAL: "--lancet-chunk-dim batch", MaskLimit.NO_LATER: "--transformer-impl transformer_engine"}


def look_once(
    mask: torch.Tensor | None, checked: Set[MaskLimit], in_layers: Iterable[tuple[Segment, Any]], num_positions: int
) -> Set[MaskLimit]:
    """Checks a micro-batch's mask against limits not checked before; the host then waits for the device.

    Args:
        mask: [B or 1, 1, s, S], True where attention is not allowed, or None.
        checked: limits checked before.
        in_layers: Megatron's layers, each with its segment of the plan.
        num_positions: sequence length of the hidden states on this rank.

    Returns:
        All limits checked so far.

    Raises:
        UsageError: attention would not follow the mask.
    """
    if mask is None:
        return checked
    configs = {limit: layer.config for segment, layer in in_layers if (limit := _limit(segment, layer)) is not None}
    new = configs.keys() - checked
    for limit in new:
        _check(mask, limit, num_positions, configs[limit])
    return checked | new


def _limit(segment: Segment, layer: Any) -> MaskLimit | None:
    """Returns the limit of a layer's attention; None if it reads the whole mask, or if stock reads none.

    Transformer Engine's causal attention ignores masks.
    """
    core = getattr(layer.self_attention, "core_attention", None)
    if not isinstance(core, SdpaAttention):
        return None
    if segment.num_chunks > 1 and segment.chunk_dim is ChunkDim.SEQUENCE and segment.range.has_attention:
        return MaskLimit.CAUSAL
    return MaskLimit.NO_LATER if layer.config.context_parallel_size > 1 else None


def _check(mask: torch.Tensor, limit: MaskLimit, num_positions: int, config: TransformerConfig) -> None:
    if config.sequence_parallel:
        num_positions *= config.tensor_model_parallel_size
    whole = num_positions * config.context_parallel_size
    own = [(0, whole)] if config.context_parallel_size == 1 else own_positions(whole, config)
    if mask.dtype is not torch.bool or mask.shape[-2:] != (num_positions, whole):
        found = f"is {mask.dtype} {list(mask.shape)}, not torch.bool [B or 1, 1, {num_positions}, {whole}]"
        raise _refusal(limit, found)
    is_wrong = torch.zeros((), dtype=torch.bool, device=mask.device)
    for _, wrong in _wrong(mask, limit, own):
        is_wrong |= wrong.any()
    if not is_wrong:
        return
    query, wrong = next((query, wrong) for query, wrong in _wrong(mask, limit, own) if wrong.any())
    *sample, row, key = wrong.nonzero()[0].tolist()
    position = int(query[row])
    verb = "allows" if key > position else "forbids"
    of_sample = f" of sample {sample[0]}" if sample else ""
    raise _refusal(limit, f"{verb} position {position}{of_sample} to attend to position {key}")


def _wrong(
    mask: torch.Tensor, limit: MaskLimit, own: Sequence[tuple[int, int]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields pieces of a mask: query positions [q], and the entries that break the limit, [..., q, S].

    Args:
        own: position ranges (start, stop) of the mask's rows.
    """
    keys = torch.arange(mask.size(-1), device=mask.device)
    queries = torch.cat([keys[start:stop] for start, stop in own])
    num_rows = max(1, _PIECE // (mask.numel() // mask.size(-2)))
    for query, rows in zip(queries.split(num_rows), mask.split(num_rows, dim=-2), strict=True):
        later = keys > query[:, None]
        yield query, (rows != later if limit is MaskLimit.CAUSAL else later & ~rows)


def _refusal(limit: MaskLimit, found: str) -> UsageError:
    return UsageError(
        f"{limit.value}, but the first micro-batch's attention mask {found}. Pass the causal mask or None, separate "
        f"documents with --dataloader-inter-document-masking, or pass {_ADVICE[limit]}."
    )


def check_mask_type(attention: Any) -> None:
    """Checks the mask type of Megatron's self-attention before it gets a kernel that is always causal.

    Raises:
        UsageError: the model spec builds it with another mask type.
    """
    if attention.attn_mask_type is not AttnMaskType.causal:
        raise UsageError(
            "sequence chunks, documents and --lancet-attention sdpa need causal self-attention, but the model "
            f"spec builds layer {attention.layer_number} with AttnMaskType.{attention.attn_mask_type.name}. Set "
            "AttnMaskType.causal there, or pass --lancet-chunk-dim batch --lancet-attention stock."
        )
