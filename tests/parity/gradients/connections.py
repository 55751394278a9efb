"""Connections that many models of a worker share, one after the other."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_lancet.patching import around
from megatron_lancet.schedule.nodes import Nodes


@contextmanager
def shared_connections(nodes: Nodes | None = None) -> Iterator[None]:
    """Inside, all models use the same connections: to make them for each takes longer than its steps."""
    from megatron.core import parallel_state

    from megatron_lancet.features.two_hop import feature as two_hop
    from megatron_lancet.runtime.comm_stats import CommStats
    from megatron_lancet.runtime.transport.select import make_hops, make_transport
    from megatron_lancet.training import overlap_setup

    cpu, timeout = torch.device("cpu"), timedelta(minutes=2)
    ep_group = parallel_state.get_expert_model_parallel_group()
    counts_group = parallel_state.get_expert_tensor_and_model_parallel_group()
    transport = make_transport(ep_group, counts_group, cpu, CommStats(cpu), timeout)
    hops = None
    if nodes is not None:
        expert_tp_size = counts_group.size() // ep_group.size()
        hops = make_hops(nodes, expert_tp_size, counts_group, cpu, CommStats(cpu), timeout)

    def the_transport(_: Any, __: Any, ___: Any, ____: Any, stats: CommStats, *_____: Any) -> Any:
        vars(transport)["_stats"] = stats
        return transport

    def the_hops(_: Any, its_nodes: Nodes, __: Any, ___: Any, ____: Any, stats: CommStats, *_____: Any, **______: Any):
        assert hops is not None
        assert its_nodes == nodes
        for hop in hops.by_kind.values():
            vars(hop.transport)["_stats"] = stats
        return hops

    with around(overlap_setup, "make_transport", the_transport), around(two_hop, "make_hops", the_hops):
        yield


@contextmanager
def parallel(sizes: Mapping[str, int], nodes: Nodes | None = None) -> Iterator[dict[str, Any]]:
    """Inside, ranks are parallel in this way and models share connections; yields the fields of the config.

    Args:
        sizes: of Megatron's groups.
        nodes: see :func:`shared_connections`.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    from tests.parity.gradients.gradients_worker import NUM_MICRO_BATCHES

    before = set(distributed_c10d._world.pg_map)
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    # As Megatron's schedule does.
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) * sizes.get("context_parallel_size", 1) / NUM_MICRO_BATCHES)
    with shared_connections(nodes):
        yield {**sizes, "sequence_parallel": "tensor_model_parallel_size" in sizes}
    # Megatron forgets its groups. They would live on, and a thread of each wakes up a hundred times a second.
    dist.barrier()
    for group in [group for group in distributed_c10d._world.pg_map if group not in before]:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
