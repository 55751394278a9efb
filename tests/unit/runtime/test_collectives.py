from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_lancet.runtime import collectives
from megatron_lancet.runtime.collectives import from_rank_0


def test_from_rank_0_returns_the_value_of_rank_0(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, src: objects.__setitem__(0, "rank 0's"))
    assert from_rank_0(lambda: pytest.fail("asked on rank 1")) == "rank 0's"


def test_new_groups_have_the_settings_for_nccl_of_another_group(monkeypatch):
    """Such as the bound of --lancet-comm-sms: the connections of two hops are not among Megatron's groups."""
    made = []
    given = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    given.config.max_ctas = 8
    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=given))
    monkeypatch.setattr(collectives, "from_all_ranks", lambda ranks: [[0, 2], [1, 3], [0, 2], [1, 3]])
    monkeypatch.setattr(dist, "new_group", lambda ranks, pg_options=None, **_: made.append(pg_options) or ranks)
    for backend in ("nccl", "cpu:gloo,cuda:nccl", "gloo"):
        monkeypatch.setattr(dist, "get_backend", lambda _, backend=backend: backend)
        assert collectives.new_groups([1, 3], 1, timedelta(seconds=1), like=group) == [[1, 3]]
    bounded, plain = made[:4], made[4:]
    assert [(options.config.max_ctas, options.is_high_priority_stream) for options in bounded] == [(8, True)] * 4
    assert bounded[0] is not bounded[1]  # torch writes the ranks of the group into them
    assert plain == [None] * 2
