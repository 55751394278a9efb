"""Sizes of rows that the planner knows without torch."""

import dataclasses

import pytest
import torch

from megatron_lancet.runtime.rows.packing import RowLayout
from megatron_lancet.schedule.comm_dtype import RowFormat
from tests.unit.profiler.synthetic import FACTS


@pytest.mark.parametrize(
    ("hidden", "dtype", "num_local", "prob_dtype"),
    [
        (32, torch.float32, 2, torch.float32),
        (12, torch.bfloat16, 9, torch.bfloat16),
        (6, torch.float32, 16, torch.float64),
    ],
)
def test_bytes_of_a_deduplicated_row_are_those_of_a_packed_one(hidden, dtype, num_local, prob_dtype):
    row = torch.empty(1, hidden, dtype=dtype)
    choice = torch.empty(1, num_local + -(-num_local // 8), dtype=prob_dtype)
    packed = RowLayout.of((row, choice)).pack((row, choice))
    row_bytes = row.nbytes
    facts = dataclasses.replace(
        FACTS,
        num_experts=2 * num_local,
        combine_row_bytes=row_bytes,
        combine_grad_row_bytes=row_bytes,
        prob_bytes=prob_dtype.itemsize,
    )
    assert facts.row_bytes_to(facts.ep_size) == facts.grad_row_bytes_to(facts.ep_size) == packed.nbytes


@pytest.mark.parametrize("hidden", [8, 96, 1000])
def test_bytes_of_a_dedup_row_in_fp8_equal_a_packed_row(hidden):
    row, prob, choice = (torch.empty(1, *shape) for shape in ((hidden,), (), (5,)))

    def row_bytes(row_format, *tensors):
        return RowLayout.of(tensors, row_format).pack(tensors).nbytes

    facts = dataclasses.replace(
        FACTS,
        num_experts=8,
        row_bytes=row_bytes(RowFormat.FP8, row, prob),
        grad_row_bytes=row_bytes(RowFormat.BF16, row, prob),
        combine_row_bytes=row_bytes(RowFormat.BF16, row),
        combine_grad_row_bytes=row_bytes(RowFormat.BF16, row),
        prob_bytes=torch.float32.itemsize,
    )
    assert facts.row_bytes_to(facts.ep_size) == row_bytes(RowFormat.FP8, row, choice)
    assert facts.grad_row_bytes_to(facts.ep_size) == row_bytes(RowFormat.BF16, row, choice)
