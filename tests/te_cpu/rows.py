"""Padding of rows: each expert's to what fp8 GEMMs want (``csrc/extensions/padding.cpp``), and sequences of several
lengths (``csrc/extensions/attention.cpp``).
"""

from collections.abc import Sequence

import torch

from tests.te_cpu.dense import dense


@dense("input", "output")
def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Copies each part's rows into its larger part of the output, followed by rows of 0."""
    _check_matrices(input, output)
    parts = zip(input.split(list(input_row_list)), output.split(list(padded_input_row_list)), strict=True)
    for rows, padded in parts:
        padded[: len(rows)].copy_(rows)
        padded[len(rows) :].zero_()


@dense("input", "output")
def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """Copies the first rows of each part into its smaller part of the output."""
    _check_matrices(input, output)
    parts = zip(input.split(list(input_row_list)), output.split(list(unpadded_input_row_list)), strict=True)
    for padded, rows in parts:
        rows.copy_(padded[: len(rows)])


def _check_matrices(input: torch.Tensor, output: torch.Tensor) -> None:
    """The kernel writes the input's type, regardless of the output's type."""
    assert input.dim() == output.dim() == 2
    assert input.dtype is output.dtype


@dense("tensor", "cu_seqlens")
def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int) -> torch.Tensor:
    """[b, max_seq_len, ...] of sequences one behind the other, each followed by zeros."""
    padded = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    for sequence, rows in zip(padded, tensor.tensor_split(cu_seqlens[1:].tolist())[:b], strict=True):
        sequence[: len(rows)].copy_(rows)
    return padded


@dense("tensor", "cu_seqlens")
def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    """The first rows of each sequence, [t, ...], one sequence behind the other."""
    rows = [sequence[:length] for sequence, length in zip(tensor, cu_seqlens.diff().tolist(), strict=True)]
    return torch.cat(rows)[:t]
