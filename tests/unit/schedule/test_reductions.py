"""How a bucket of gradients is cut: every element once, nothing larger than asked for."""

import itertools

import pytest

from megatron_lancet.schedule.reductions import MicroOps


@pytest.mark.parametrize("num_elements", [8, 640, 10_008])
@pytest.mark.parametrize("num_shards", [1, 2, 8])
@pytest.mark.parametrize("chunk_bytes", [32, 1000, 30_000_000])
def test_micro_ops_of_reductions_cover_each_shard_once(num_elements, num_shards, chunk_bytes):
    parts = list(MicroOps(chunk_bytes).cut(num_elements, 4, num_shards))
    assert parts[0][0] == 0
    assert parts[-1][1] == num_elements // num_shards
    assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
    assert all(0 < (end - start) * 4 * num_shards <= chunk_bytes for start, end in parts)


def test_large_micro_ops_begin_at_aligned_addresses():
    assert [start % 64 for start, _ in MicroOps(1000).cut(2000, 4)] == [0] * 11


def test_micro_ops_below_an_element_per_shard_make_progress():
    assert list(MicroOps(1).cut(4, 4, 2)) == [(0, 1), (1, 2)]


def test_micro_op_size_of_zero_is_refused():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        MicroOps(0)
