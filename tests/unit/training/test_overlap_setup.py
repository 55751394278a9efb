"""Ranks compare their nodes before anything depends on them, and the hosts that they run on."""

import re
from datetime import timedelta

import pytest
import torch
from megatron.core import parallel_state

from megatron_lancet.errors import UsageError
from megatron_lancet.features.two_hop import feature
from megatron_lancet.features.two_hop.feature import ActiveNodes
from megatron_lancet.schedule.nodes import Nodes
from tests.fakes import cpu_stats

ADVICE = (
    "Pass --lancet-ranks-per-node N to all ranks, the number of them that are started on each node, or choose a plan "
    "without two hops (--lancet-dispatch plain or dedup)."
)


@pytest.fixture
def compare(monkeypatch):
    """Compares eight ranks; they have the nodes and hosts that are given, in rank order."""

    def compare(nodes, hosts, expert_tp_size=1):
        monkeypatch.setattr(parallel_state, "get_expert_tensor_parallel_world_size", lambda: expert_tp_size)

        def from_all_ranks(own):
            assert own[0] == nodes[0]
            return list(zip(nodes, hosts, strict=True))

        monkeypatch.setattr(feature, "from_all_ranks", from_all_ranks)
        ActiveNodes(nodes[0], torch.device("cpu"), cpu_stats(), timedelta(minutes=1)).check_ranks()

    return compare


@pytest.mark.parametrize(
    ("nodes", "expert_tp_size"), [(Nodes(2, 4), 1), (Nodes(2, 2), 2), (Nodes(4, 2), 1), (None, 1)], ids=str
)
def test_nodes_may_share_a_host(compare, nodes, expert_tp_size):
    compare([nodes] * 8, ["here"] * 8, expert_tp_size)
    compare([nodes] * 8, ["here"] * 4 + ["there"] * 4, expert_tp_size)
    if nodes is None:
        compare([nodes] * 8, ["here", "there"] * 4)


@pytest.mark.parametrize(("nodes", "expert_tp_size"), [(Nodes(2, 4), 1), (Nodes(2, 2), 2)], ids=str)
def test_node_on_several_hosts_is_refused(compare, nodes, expert_tp_size):
    told = f"ranks 4-7 are taken for a node, but are on several hosts: b on ranks 4-5, c on ranks 6-7. {ADVICE}"
    with pytest.raises(UsageError, match=f"^{re.escape(told)}$"):
        compare([nodes] * 8, ["a"] * 4 + ["b"] * 2 + ["c"] * 2, expert_tp_size)


def test_ranks_that_disagree_about_nodes_are_refused(compare):
    told = (
        "ranks disagree about which of them share a node: 2 nodes x 4 ranks on ranks 0-3, 6, no two hops on ranks 4-5, "
        f"4 nodes x 2 ranks on rank 7. {ADVICE}"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(told)}$"):
        compare([Nodes(2, 4)] * 4 + [None] * 2 + [Nodes(2, 4), Nodes(4, 2)], ["a"] * 8)
