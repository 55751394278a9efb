"""Padding of the rows of each expert to what fp8 GEMMs want: ``csrc/extensions/padding.cpp``."""

from collections.abc import Sequence

import torch


def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Copies each part's rows into its larger part of the output, followed by rows of 0."""
    parts = zip(input.split(list(input_row_list)), output.split(list(padded_input_row_list)), strict=True)
    for rows, padded in parts:
        padded[: len(rows)].copy_(rows)
        padded[len(rows) :].zero_()


def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """Copies the first rows of each part into its smaller part of the output."""
    parts = zip(input.split(list(input_row_list)), output.split(list(unpadded_input_row_list)), strict=True)
    for padded, rows in parts:
        rows.copy_(padded[: len(rows)])
