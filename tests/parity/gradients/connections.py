"""Connections that many models of a worker share, one after the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from megatron_lancet.patching import around
from megatron_lancet.schedule.nodes import Nodes


@contextmanager
def shared_connections(nodes: Nodes | None = None) -> Iterator[None]:
    """Inside, all models use the same connections: to make them for each takes longer than its steps."""
    from megatron.core import parallel_state

    from megatron_lancet.runtime.comm_stats import CommStats
    from megatron_lancet.runtime.transport.select import make_hops, make_transport
    from megatron_lancet.training import overlap_setup

    cpu, timeout = torch.device("cpu"), timedelta(minutes=2)
    ep_group = parallel_state.get_expert_model_parallel_group()
    counts_group = parallel_state.get_expert_tensor_and_model_parallel_group()
    transport = make_transport(ep_group, counts_group, cpu, CommStats(cpu), timeout)
    hops = None
    if nodes is not None:
        num_holders = counts_group.size() // ep_group.size()
        hops = make_hops(nodes, num_holders, counts_group, cpu, CommStats(cpu), timeout)

    def the_transport(_: Any, __: Any, ___: Any, ____: Any, stats: CommStats, *_____: Any) -> Any:
        vars(transport)["_stats"] = stats
        return transport

    def the_hops(_: Any, its_nodes: Nodes, __: Any, ___: Any, ____: Any, stats: CommStats, *_____: Any, **______: Any):
        assert hops is not None
        assert its_nodes == nodes
        for hop in hops.by_kind.values():
            vars(hop.transport)["_stats"] = stats
        return hops

    with around(overlap_setup, "make_transport", the_transport), around(overlap_setup, "make_hops", the_hops):
        yield
