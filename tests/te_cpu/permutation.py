"""Permutation of tokens by their experts, in torch: Triton's interpreter takes a millisecond per token for it.

Functions as in ``transformer_engine/pytorch/triton/permutation.py``, whose kernels are in ``common/triton``. A token's
line of ``row_id_map`` [tokens, 2 * experts + 1] has its permuted rows, the last row first; their experts; and how many.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from megatron_lancet.patching import replaced

NAMES = (
    "make_row_id_map",
    "permute_with_mask_map",
    "unpermute_with_mask_map",
    "unpermute_with_mask_map_bwd_with_merging_probs",
    "make_chunk_sort_map",
    "sort_chunks_by_map",
)


@contextmanager
def permutation_in_torch() -> Iterator[None]:
    """Inside the context Transformer Engine's permutation calls the functions of this file."""
    from transformer_engine.pytorch.triton import permutation

    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(replaced(permutation, name, globals()[name]))
        yield


def make_row_id_map(routing_map: torch.Tensor, num_tokens: int, num_experts: int) -> torch.Tensor:
    """The map of a routing map [tokens, experts], whose permuted rows are sorted by expert, then by token."""
    chosen = routing_map.bool()
    rows = torch.where(chosen, chosen.t().flatten().cumsum(0).view(num_experts, num_tokens).t() - 1, -1)
    rows, experts = rows.sort(dim=1, descending=True)
    return torch.cat([rows, experts, chosen.sum(dim=1, keepdim=True)], dim=1).int()


def _entries(
    row_id_map: torch.Tensor, num_experts: int, pad_offsets: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens, rows and experts of the first entry of each line, of the second, and so on."""
    num_routed = row_id_map[:, -1]
    for i in range(num_experts):
        tokens = (num_routed > i).nonzero().flatten()
        rows, experts = row_id_map[tokens, i].long(), row_id_map[tokens, num_experts + i].long()
        yield tokens, rows if pad_offsets is None else rows + pad_offsets[experts], experts


def permute_with_mask_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    scale: torch.Tensor | None,
    pad_offsets: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Permuted tokens with their scales and probabilities; a token whose probability is 0 becomes 0."""
    output = inp.new_zeros(num_out_tokens, hidden_size)
    permuted_probs = probs.new_zeros(num_out_tokens) if probs is not None else None
    permuted_scale = scale.new_zeros(num_out_tokens, scale_hidden_dim) if scale is not None else None
    for tokens, rows, experts in _entries(row_id_map, num_experts, pad_offsets):
        values = inp[tokens]
        if probs is not None:
            own = probs[tokens, experts]
            permuted_probs[rows] = own
            values = torch.where(own[:, None] == 0, torch.zeros_like(values), values)
        output[rows] = values
        if scale is not None:
            permuted_scale[rows] = scale[tokens]
    return output, permuted_scale, permuted_probs


def unpermute_with_mask_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None,
    permuted_probs: torch.Tensor | None,
    pad_offsets: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum, in fp32, of each token's rows, weighted where there are probabilities; and unpermuted probabilities."""
    output = torch.zeros(num_tokens, hidden_size)
    probs = permuted_probs.new_zeros(num_tokens, num_experts) if permuted_probs is not None else None
    for tokens, rows, experts in _entries(row_id_map, num_experts, pad_offsets):
        values = inp[rows].float()
        if merging_probs is not None:
            values = values * merging_probs[tokens, experts, None].float()
        output[tokens] += values
        if probs is not None:
            probs[tokens, experts] = permuted_probs[rows]
    return output.to(inp.dtype), probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: torch.Tensor,
    row_id_map: torch.Tensor,
    fwd_input: torch.Tensor,
    merging_probs: torch.Tensor,
    pad_offsets: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the rows and of the probabilities of a weighted sum."""
    rows_grad = fwd_output_grad.new_zeros(num_out_tokens, hidden_size)
    probs_grad = merging_probs.new_zeros(num_tokens, num_experts)
    for tokens, rows, experts in _entries(row_id_map, num_experts, pad_offsets):
        grad = fwd_output_grad[tokens].float()
        rows_grad[rows] = (grad * merging_probs[tokens, experts, None].float()).to(rows_grad.dtype)
        probs_grad[tokens, experts] = (fwd_input[rows].float() * grad).sum(dim=1).to(probs_grad.dtype)
    return rows_grad, probs_grad


def make_chunk_sort_map(
    split_sizes: torch.Tensor, sorted_indices: torch.Tensor, num_tokens: int, num_splits: int
) -> torch.Tensor:
    """For each row of chunks that lie one after the other the row where it lies once they are sorted."""
    sizes = split_sizes.tolist()
    starts = split_sizes.cumsum(0) - split_sizes
    rows = torch.arange(num_tokens, dtype=torch.int32)
    end = 0
    for chunk in sorted_indices.tolist():
        rows[starts[chunk] : starts[chunk] + sizes[chunk]] = torch.arange(end, end + sizes[chunk], dtype=torch.int32)
        end += sizes[chunk]
    return rows


def sort_chunks_by_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and probabilities moved by the map, or back."""
    rows = row_id_map.long()

    def moved(values: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(values).index_copy_(0, rows, values) if is_forward else values[rows]

    return moved(inp), moved(probs) if probs is not None else None
