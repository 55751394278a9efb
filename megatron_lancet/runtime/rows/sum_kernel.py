"""The kernel that sums rows, in Triton: it reads each row once and adds in fp32.

Importing this module needs Triton.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024
"""Elements of a row that a block sums."""
_NUM_WARPS = 4


def launch(rows_nH: torch.Tensor, order_n: torch.Tensor, ends: torch.Tensor, sums_pH: torch.Tensor) -> None:
    """Enqueues the sums on the current stream; see :func:`~megatron_lancet.runtime.rows.sums.sum_rows`."""
    num_places, num_elements = sums_pH.shape
    grid = num_places, triton.cdiv(num_elements, _BLOCK)
    row_sum_kernel[grid](
        rows_nH, rows_nH.stride(0), order_n, ends, sums_pH, num_elements, BLOCK=_BLOCK, num_warps=_NUM_WARPS
    )


@triton.jit
def row_sum_kernel(  # type: ignore[no-untyped-def]
    rows, row_stride, order, ends, sums, num_elements, BLOCK: tl.constexpr
):
    """Sums up to ``BLOCK`` elements of the rows of one place."""
    place = tl.program_id(0).to(tl.int64)
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = elements < num_elements
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for at in range(tl.load(ends + place), tl.load(ends + place + 1)):
        row = tl.load(order + at).to(tl.int64)
        total += tl.load(rows + row * row_stride + elements, mask=is_there, other=0).to(tl.float32)
    tl.store(sums + place * num_elements + elements, total.to(sums.dtype.element_ty), mask=is_there)
