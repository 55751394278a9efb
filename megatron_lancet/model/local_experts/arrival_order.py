"""A grouped GEMM that takes rows in the order in which they arrive from other ranks, in Triton (Comet section 3.2).

Rows of other ranks are written into this rank's memory while the kernel runs, by copy engines through symmetric memory,
and each source raises a counter when its rows are complete. The programs of the kernel stay on the device and take
blocks of rows from a list: first those of this rank, then those of the source whose rows come next. A program waits for
the counter of its block's source. When a block is done it raises another counter, so that what goes back to a source
can leave as soon as all of that source's blocks are done.

Nothing calls this kernel yet: no transport here writes into another rank's memory. It has run under Triton's
interpreter on a CPU, which tells that its numbers, its order and its counters are right, and it compiles for a device;
**it has never run on one**, so nothing is known of its speed, nor of races. Importing this module needs Triton.

Legend of shapes: m rows, K columns of a row, N columns of a product, e local experts, S sources, b blocks of rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_SUMMANDS = 64, 64, 32
"""Sizes of the blocks of a product, and of what is added to one at a time. Not tuned."""
MAX_SPINS = 1 << 26
"""How often a program looks at a counter before it gives up, so that a lost rank is an error and not a hang."""


class ArrivalOrder(NamedTuple):
    """Blocks of rows in the order in which they are computed.

    Attributes:
        blocks: [b, 4] int32; source, expert, first row and end of the rows of each block.
        num_blocks: number of blocks of each source, [S].
    """

    blocks: torch.Tensor
    num_blocks: tuple[int, ...]

    @staticmethod
    def of(
        rows_by_source: Sequence[Sequence[int]], sources: Sequence[int], block_rows: int = BLOCK_ROWS
    ) -> "ArrivalOrder":
        """Divides rows, which lie by source and then by expert, into blocks of one source and one expert.

        Args:
            rows_by_source: [S][e], rows for each local expert from each source.
            sources: all sources, in the order in which their rows are expected.
            block_rows: rows of a block at most.
        """
        if sorted(sources) != list(range(len(rows_by_source))):
            raise ValueError(f"expected each of {len(rows_by_source)} sources once, found {list(sources)}")
        first_rows, row = [], 0
        for rows in rows_by_source:
            first_rows.append(row)
            row += sum(rows)
        blocks = []
        for source in sources:
            row = first_rows[source]
            for expert, num_rows in enumerate(rows_by_source[source]):
                end = row + num_rows
                blocks += [(source, expert, at, min(at + block_rows, end)) for at in range(row, end, block_rows)]
                row = end
        counts = [0] * len(rows_by_source)
        for source, *_ in blocks:
            counts[source] += 1
        return ArrivalOrder(torch.tensor(blocks, dtype=torch.int32).view(-1, 4), tuple(counts))


def sources_in_order(own_rank: int, num_ranks: int) -> list[int]:
    """The rank itself, whose rows are here, and the others in the order of their messages.

    Each rank sends to the next one first, so the rows of the rank before it come first, and no two ranks send to
    the same one at a time.
    """
    return [(own_rank - distance) % num_ranks for distance in range(num_ranks)]


class Counters(NamedTuple):
    """What the ranks tell each other by raising numbers in each other's memory; int32, [S] each.

    Attributes:
        arrived: raised by one when a source's rows are complete.
        done: raised by one for each block of a source's product.
        late: set to 1 if a source's rows did not come in time; its blocks are left out, and the caller has to fail.
    """

    arrived: torch.Tensor
    done: torch.Tensor
    late: torch.Tensor

    @staticmethod
    def zeros(num_sources: int, device: torch.device) -> "Counters":
        """Counters at the begin of a run; ``arrived`` is never reset, so that no reset can meet a late message."""
        arrived, done, late = torch.zeros(3, num_sources, dtype=torch.int32, device=device)
        return Counters(arrived, done, late)


def multiply_in_arrival_order(
    rows_mK: torch.Tensor,
    weights_eNK: torch.Tensor,
    order: ArrivalOrder,
    counters: Counters,
    expected: int,
    num_programs: int,
    products_mN: torch.Tensor | None = None,
    max_spins: int = MAX_SPINS,
) -> torch.Tensor:
    """Multiplies each row by the weight of its expert; waits on the device for the rows of each source.

    Args:
        rows_mK: by source, then by expert.
        weights_eNK: any strides: a transposed view gives the product of the backward.
        order: on the device of the rows.
        expected: value of a source's ``arrived`` from which on its rows are complete.
        num_programs: programs that stay on the device; at most as many as can run at a time, less what copies need.
        products_mN: written to; None for a new tensor.
        max_spins: how often a program looks at a counter.

    Returns:
        Products [m, N]. ``done`` tells which are there, in units of :func:`blocks_of_product`.

    Raises:
        ValueError: shapes or types do not fit.
    """
    _check(rows_mK, weights_eNK)
    num_columns = weights_eNK.size(1)
    if products_mN is None:
        products_mN = rows_mK.new_empty(rows_mK.size(0), num_columns)
    column_blocks = triton.cdiv(num_columns, BLOCK_COLUMNS)
    num_jobs = len(order.blocks) * column_blocks
    if num_jobs:
        _multiply[(min(num_programs, num_jobs),)](
            rows_mK,
            weights_eNK,
            products_mN,
            order.blocks,
            *counters,
            expected,
            max_spins,
            num_jobs,
            column_blocks,
            num_columns,
            rows_mK.size(1),
            *rows_mK.stride(),
            *weights_eNK.stride(),
            *products_mN.stride(),
            BLOCK_M=BLOCK_ROWS,
            BLOCK_N=BLOCK_COLUMNS,
            BLOCK_K=BLOCK_SUMMANDS,
        )
    return products_mN


def blocks_of_product(order: ArrivalOrder, num_columns: int) -> list[int]:
    """How far ``done`` of each source is raised by one product, [S]: what its sender waits for."""
    return [number * triton.cdiv(num_columns, BLOCK_COLUMNS) for number in order.num_blocks]


def _check(rows_mK: torch.Tensor, weights_eNK: torch.Tensor) -> None:
    if weights_eNK.dim() != 3 or rows_mK.dim() != 2 or rows_mK.size(1) != weights_eNK.size(2):
        raise ValueError(
            f"expected rows [m, K] and weights [e, N, K], found {list(rows_mK.shape)} and {list(weights_eNK.shape)}"
        )
    if rows_mK.dtype != weights_eNK.dtype:
        raise ValueError(f"rows are {rows_mK.dtype} and weights {weights_eNK.dtype}: expected one type")


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    rows,
    is_row,
    row_stride,
    columns,
    is_column,
    column_stride,
    num_summands,
    BLOCK_K: tl.constexpr,
):
    """A block of the product, in 32 bits: ``rows`` and ``columns`` point to the first summand of each."""
    total = tl.full((rows.shape[0], columns.shape[0]), 0.0, dtype=tl.float32)
    for start in range(0, num_summands, BLOCK_K):
        summands = start + tl.arange(0, BLOCK_K)
        is_summand = summands < num_summands
        a = tl.load(
            rows[:, None] + summands[None, :] * row_stride, mask=is_row[:, None] & is_summand[None, :], other=0.0
        )
        b = tl.load(
            columns[None, :] + summands[:, None] * column_stride,
            mask=is_column[None, :] & is_summand[:, None],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    rows,
    weights,
    products,
    blocks,
    arrived,
    done,
    late,
    expected,
    max_spins,
    num_jobs,
    column_blocks,
    num_columns,
    num_summands,
    row_stride,
    row_column_stride,
    expert_stride,
    output_stride,
    input_stride,
    product_stride,
    product_column_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: every ``num_programs``-th block of the product, rows in the order of the list."""
    for job in range(tl.program_id(0), num_jobs, tl.num_programs(0)):
        block = blocks + (job // column_blocks) * 4
        source, expert = tl.load(block), tl.load(block + 1)
        first, end = tl.load(block + 2), tl.load(block + 3)
        # Acquire: no row is read before the counter says that it is there, whichever rank or engine has written it.
        seen = tl.atomic_add(arrived + source, 0, sem="acquire", scope="sys")
        spins = 0
        while (seen < expected) & (spins < max_spins):
            seen = tl.atomic_add(arrived + source, 0, sem="acquire", scope="sys")
            spins += 1
        tl.debug_barrier()  # one thread has looked; the others read behind it
        if seen < expected:
            tl.store(late + source, 1)
        else:
            in_rows = first + tl.arange(0, BLOCK_M)
            in_columns = (job % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
            total = _sums(
                rows + in_rows.to(tl.int64) * row_stride,
                in_rows < end,
                row_column_stride,
                weights + expert.to(tl.int64) * expert_stride + in_columns * output_stride,
                in_columns < num_columns,
                input_stride,
                num_summands,
                BLOCK_K,
            )
            at = products + in_rows[:, None].to(tl.int64) * product_stride + in_columns[None, :] * product_column_stride
            is_there = (in_rows[:, None] < end) & (in_columns[None, :] < num_columns)
            tl.store(at, total.to(products.dtype.element_ty), mask=is_there)
            # Release: who sees the raised counter sees the products. One thread raises it, and its release orders what
            # the others have stored only behind a barrier.
            tl.debug_barrier()
            tl.atomic_add(done + source, 1, sem="release", scope="sys")
