"""Ranks compare their nodes before anything depends on them, and the hosts that they run on."""

import re

import pytest
from megatron.core import parallel_state

from megatron_lancet.errors import UsageError
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import fixed_plan
from megatron_lancet.training import overlap_setup
from megatron_lancet.training.overlap_setup import check_same_plan

PLAN = fixed_plan(2, dispatch=TWO_HOP)
ADVICE = (
    "Pass --lancet-ranks-per-node N to all ranks, the number of them that are started on each node, or choose a plan "
    "without two hops (--lancet-dispatch plain or dedup)."
)


@pytest.fixture
def compare(monkeypatch):
    """Compares the plans of eight ranks; the last have the nodes and hosts that are given, in rank order."""

    def compare(nodes, hosts, expert_tp_size=1):
        monkeypatch.setattr(parallel_state, "get_expert_tensor_parallel_world_size", lambda: expert_tp_size)

        def from_all_ranks(own):
            fingerprint, _, _ = own
            return [(fingerprint, theirs, host) for theirs, host in zip(nodes, hosts, strict=True)]

        monkeypatch.setattr(overlap_setup, "from_all_ranks", from_all_ranks)
        check_same_plan(PLAN, nodes=nodes[0])

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
