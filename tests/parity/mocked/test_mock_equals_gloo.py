"""Collectives of two gloo ranks, and of rank 0 of a mocked world, on the data for which both are defined alike."""

import pytest
import torch
import torch.distributed as dist

from megatron_lancet.testkit.mock.mock_world import mock_world
from tests.ranks import launch

pytestmark = pytest.mark.distributed

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def collectives(group: dist.ProcessGroup) -> dict[str, list]:
    """Results on this rank, where all ranks hold the same data."""
    results: dict[str, list] = {}
    for dtype in DTYPES:
        x = (100 * torch.randn(4, 3, generator=torch.Generator().manual_seed(1))).to(dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            reduced, part, listed = x.clone(), torch.empty_like(x[:2]), torch.empty_like(x[:2])
            work = dist.all_reduce(reduced, op=op, group=group, async_op=True)
            work.wait()
            dist.reduce_scatter_tensor(part, x, op=op, group=group)
            dist.reduce_scatter(listed, list(x.clone().split(2)), op=op, group=group)
            results[f"reductions {op} {dtype}"] = [reduced, part, listed]
        gathered, parts = x.new_empty(8, 3), [torch.empty_like(x) for _ in range(2)]
        dist.all_gather_into_tensor(gathered, x, group=group)
        dist.all_gather(parts, x, group=group)
        sent, to_root = x.clone(), x.clone()
        dist.broadcast(sent, src=0, group=group)
        dist.reduce(to_root, dst=0, group=group)
        coalesced = [x.clone(), x[0].clone()]
        with dist.distributed_c10d._coalescing_manager(group):
            for tensor in coalesced:
                dist.all_reduce(tensor, group=group)
        results[f"gathered {dtype}"] = [gathered, *parts]
        results[f"broadcast, reduced {dtype}"] = [sent, to_root]
        results[f"coalesced {dtype}"] = coalesced
        results[f"all_to_all {dtype}"] = symmetric_all_to_all(group, dtype)
    objects: list = [None] * 2
    dist.all_gather_object(objects, {"a": 1}, group=group)
    broadcast = [("b", 2)]
    dist.broadcast_object_list(broadcast, src=0, group=group)
    results["objects"] = [objects, broadcast]
    dist.barrier(group)
    return results


def symmetric_all_to_all(group: dist.ProcessGroup, dtype: torch.dtype) -> list[torch.Tensor]:
    """Ranks i and j send each other the same rows: only then is a loopback what a real exchange gives."""

    def rows_between(i: int, j: int) -> torch.Tensor:
        seed = min(i, j) * 10 + max(i, j)
        return (100 * torch.randn(2 + i + j, 3, generator=torch.Generator().manual_seed(seed))).to(dtype)

    rank = group.rank()
    parts = [rows_between(rank, peer) for peer in range(group.size())]
    sizes = [len(part) for part in parts]
    received = torch.empty_like(torch.cat(parts))
    dist.all_to_all_single(received, torch.cat(parts), sizes, sizes, group=group)
    counts = torch.tensor(sizes)
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(received_counts, counts, group=group)
    return [received, received_counts]


def equal(ours: list, real: list) -> bool:
    return len(ours) == len(real) and all(
        a.dtype == b.dtype and a.equal(b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ours, real, strict=True)
    )


def real_results(file: str) -> None:
    """Saves the results of this rank."""
    torch.save(collectives(dist.group.WORLD), f"{file}.{dist.get_rank()}")


def mocked_results(file: str) -> None:
    with mock_world(2):
        torch.save(collectives(dist.new_group([0, 1])), file)


def test_mocked_collectives_equal_gloos_bit_by_bit(tmp_path):
    launch.results_of(real_results, 2, tmp_path / "gloo", args=[str(tmp_path / "real")])
    launch.results_of(mocked_results, 1, tmp_path / "mock", args=[str(tmp_path / "mocked")], joins=False)
    real, mocked = (torch.load(tmp_path / name) for name in ("real.0", "mocked"))
    assert len(real) == 22
    assert real.keys() == mocked.keys()
    assert [name for name in real if not equal(mocked[name], real[name])] == []
