"""Shifts tokens and labels of packed documents, as multi-token prediction needs them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams


def shifted_in_documents(
    stock: Callable[..., tuple[Any, Any]],
    tensor: torch.Tensor | None,
    shifts: int = -1,
    dims: int = -1,
    cp_group: dist.ProcessGroup | None = None,
    packed_seq_params: PackedSeqParams | None = None,
) -> tuple[Any, Any]:
    """Megatron's ``roll_tensor``, which takes the documents of several samples for the documents of one.

    Args:
        tensor: [B, S] or [1, B * S], tokens, labels or their masks; each position gets the value of the next one, and
            the last one of a document 0.

    Returns:
        The shifted tensor, and its sum.
    """
    if tensor is None or packed_seq_params is None or (cp_group is not None and cp_group.size() > 1):
        return stock(tensor, shifts, dims, cp_group, packed_seq_params)
    assert (shifts, dims % tensor.dim()) == (-1, tensor.dim() - 1), "Megatron shifts by one, along the positions"
    assert packed_seq_params.cu_seqlens_q is not None
    rolled = tensor.flatten().roll(-1)
    rolled[packed_seq_params.cu_seqlens_q[1:].to(tensor.device, torch.long) - 1] = 0
    return rolled.view(tensor.shape), rolled.sum()
