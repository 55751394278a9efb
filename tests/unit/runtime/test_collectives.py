import pytest
import torch.distributed as dist

from megatron_lancet.runtime.collectives import from_rank_0


def test_from_rank_0_returns_the_value_of_rank_0(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, src: objects.__setitem__(0, "rank 0's"))
    assert from_rank_0(lambda: pytest.fail("asked on rank 1")) == "rank 0's"
