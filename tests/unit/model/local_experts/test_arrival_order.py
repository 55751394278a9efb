"""The grouped GEMM in the order of arrival: numbers, order of blocks and counters under Triton's interpreter."""

from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.triton_kernels import loaded_kernels


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return loaded_kernels(interpreted=True)


def expected_products(rows, weights, rows_by_source):
    sizes = [size for of_source in rows_by_source for size in of_source]
    parts = zip(rows.split(sizes), list(weights) * len(rows_by_source), strict=True)
    return torch.cat([part @ weight.t() for part, weight in parts])


def all_here(kernels, num_sources, step=1):
    counters = kernels.Counters.zeros(num_sources, torch.device("cpu"))
    counters.arrived.fill_(step)
    return counters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # bfloat16: the interpreter has no product
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "rows_by_source", [[[70, 3], [1, 0], [0, 65]], [[0, 0], [64, 128]], [[5]]], ids=["three", "idle", "one"]
)
def test_products_are_those_of_each_expert(kernels, rows_by_source, transposed, dtype):
    num_experts, num_rows = len(rows_by_source[0]), sum(map(sum, rows_by_source))
    torch.manual_seed(0)
    weights = torch.randn(num_experts, 40, 72)
    if transposed:
        weights = weights.transpose(1, 2)
    rows, weights = torch.randn(num_rows, weights.size(2)).to(dtype), weights.to(dtype)
    counters = all_here(kernels, len(rows_by_source))
    order = kernels.ArrivalOrder.of(rows_by_source, kernels.sources_in_order(0, len(rows_by_source)))
    products = kernels.multiply_in_arrival_order(rows, weights, order, counters, 1, num_programs=3)
    expected = expected_products(rows.float(), weights.float(), rows_by_source)
    assert products.dtype == dtype
    scale = 1e-6 if dtype is torch.float32 else 5e-4  # of float16, one rounding of the result
    assert (products.float() - expected).norm() <= scale * expected.norm()
    assert counters.done.tolist() == kernels.blocks_of_product(order, weights.size(1))
    assert counters.late.tolist() == [0] * len(rows_by_source)


@examples(200)
@given(data=st.data())
def test_every_row_is_in_one_block_of_its_source_and_expert(kernels, data):
    num_sources, num_experts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    of_source = st.lists(st.integers(0, 20), min_size=num_experts, max_size=num_experts)
    rows_by_source = data.draw(st.lists(of_source, min_size=num_sources, max_size=num_sources))
    own = data.draw(st.integers(0, num_sources - 1))
    sources = kernels.sources_in_order(own, num_sources)
    order = kernels.ArrivalOrder.of(rows_by_source, sources, block_rows=8)
    owners = [(s, e) for s, rows in enumerate(rows_by_source) for e, number in enumerate(rows) for _ in range(number)]
    found: dict[int, tuple[int, int]] = {}
    for source, expert, first, end in order.blocks.tolist():
        assert 0 < end - first <= 8
        for row in range(first, end):
            assert found.setdefault(row, (source, expert)) == (source, expert)
    assert [found[row] for row in sorted(found)] == owners
    assert sources[0] == own, "the rank's own rows are there"
    places = [sources.index(block[0]) for block in order.blocks.tolist()]
    assert places == sorted(places)


def test_ranks_send_to_different_ranks_at_a_time(kernels):
    sources = [kernels.sources_in_order(own, 4) for own in range(4)]
    for step in zip(*sources, strict=True):
        assert sorted(step) == [0, 1, 2, 3]


@pytest.mark.parametrize("takes_in_order", [True, False])
def test_blocks_are_taken_in_the_order_of_the_list(kernels, takes_in_order):
    """Each source's rows count as here when all blocks of the source before it in the list are done."""
    rows_by_source = [[64, 64]] * 3
    sources = [0, 1, 2] if takes_in_order else [0, 2, 1]
    chain = torch.zeros(4, dtype=torch.int32)
    chain[0] = 2
    counters = kernels.Counters(chain[:-1], chain[1:], torch.zeros(3, dtype=torch.int32))
    order = kernels.ArrivalOrder.of(rows_by_source, sources)
    rows, weights = torch.randn(384, 32), torch.randn(2, 32, 32)
    kernels.multiply_in_arrival_order(rows, weights, order, counters, 2, num_programs=1, max_spins=3)
    assert counters.late.tolist() == ([0, 0, 0] if takes_in_order else [0, 0, 1])


def test_rows_that_are_not_here_are_not_read_and_named(kernels):
    """The counter still has the value of the step before: the source's blocks are left out, the others are done."""
    rows_by_source = [[3, 2], [4, 4], [1, 6]]
    counters = all_here(kernels, 3, step=2)
    counters.arrived[1] = 1
    order = kernels.ArrivalOrder.of(rows_by_source, [0, 1, 2])
    rows, weights = torch.randn(20, 32), torch.randn(2, 16, 32)
    products = torch.full((20, 16), torch.nan)
    kernels.multiply_in_arrival_order(rows, weights, order, counters, 2, 2, products, max_spins=2)
    expected = expected_products(rows, weights, rows_by_source)
    assert counters.late.tolist() == [0, 1, 0]
    assert counters.done.tolist() == [2, 0, 2]
    assert products[5:13].isnan().all()
    torch.testing.assert_close(products[:5], expected[:5])
    torch.testing.assert_close(products[13:], expected[13:])


def test_what_does_not_fit_is_refused(kernels):
    rows = torch.randn(4, 8)
    order, counters = kernels.ArrivalOrder.of([[4]], [0]), all_here(kernels, 1)
    with pytest.raises(ValueError, match=r"found \[4, 8\] and \[1, 5, 9\]"):
        kernels.multiply_in_arrival_order(rows, torch.randn(1, 5, 9), order, counters, 1, 1)
    with pytest.raises(ValueError, match="expected one type"):
        kernels.multiply_in_arrival_order(rows, torch.randn(1, 5, 8).bfloat16(), order, counters, 1, 1)
    with pytest.raises(ValueError, match=r"each of 2 sources once, found \[0, 0\]"):
        kernels.ArrivalOrder.of([[4], [2]], [0, 0])
