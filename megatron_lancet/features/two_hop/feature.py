"""How ranks lie on nodes, ``--lancet-ranks-per-node``: connections for two hops, and what leaves a node."""

import argparse
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature, Feature
from megatron_lancet.flags import CheckedFlags, flag
from megatron_lancet.runtime.collectives import from_all_ranks
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.select import make_hops
from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.ranges import name_ranks
from megatron_lancet.training.plan.dispatch import SOME_NODES, allowed_dispatches, layout_of, nodes_of
from megatron_lancet.training.platform.launcher import FLAG
from megatron_lancet.training.run import OverlappedRun, Run


@dataclass(frozen=True)
class NodeFlags(CheckedFlags):
    """The number of ranks of a node."""

    ranks_per_node: int | None = flag(
        None,
        parsed_as=int,
        at_least=1,
        metavar="N",
        advice="Defaults to the launcher's value.",
        unchecked="",
        help="ranks of each node, for --lancet-dispatch two-hop: ranks 0 to N-1 share a node, then the next N. "
        "Default: the launcher's value (LOCAL_WORLD_SIZE of torchrun, or SLURM's tasks per node); unknown in a mocked "
        "world and in a dry run.",
    )


class NodesFeature(Feature):
    """``--lancet-ranks-per-node``."""

    name = "two_hop"
    flags = NodeFlags

    def ranks_per_node(self, config: LancetConfig) -> int | None:
        """The flag's value."""
        return config.of(NodeFlags).ranks_per_node

    def choice_notes(self, args: argparse.Namespace, config: LancetConfig) -> Iterator[str]:
        """Yields a line on two hops where they are possible and nodes are unknown."""
        note = unknown_nodes_note(args, config)
        if note is not None:
            yield note

    def start(self, run: Run) -> "ActiveNodes | None":
        """Connects the run's nodes if its plans may need it."""
        if not isinstance(run, OverlappedRun) or run.facts.plan is None:
            return None
        args, config = run.facts.args, run.config
        nodes, layout = nodes_to_connect(args, config, run.facts.plan, run.facts.plan_changes), nodes_of(args, config)
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        return ActiveNodes(nodes, run.device, run.stats, timeout, layout if isinstance(layout, Nodes) else None)


class ActiveNodes(ActiveFeature):
    """The nodes of a run."""

    def __init__(
        self,
        nodes: Nodes | None,
        device: torch.device,
        stats: CommStats,
        timeout: timedelta,
        layout: Nodes | None = None,
    ) -> None:
        """
        Args:
            nodes: how expert-parallel groups lie on nodes; None if no plan of the run has two hops.
            timeout: maximum wait for other ranks' messages.
            layout: the same whatever the run's plans are, to count what leaves a node; None if it is unknown.
        """
        self._nodes, self._layout = nodes, layout
        self._device, self._stats, self._timeout = device, stats, timeout

    def check_ranks(self) -> None:
        """Refuses ranks that disagree about nodes, or whose hosts contradict these."""
        all_ranks = from_all_ranks((self._nodes, socket.gethostname()))
        check_nodes([nodes for nodes, _ in all_ranks], [host for _, host in all_ranks])

    def comm_settings(self) -> Mapping[str, Any]:
        """The connections of two hops, which it makes. Collective over all ranks."""
        hops = None
        if self._nodes is not None:
            ep_group = parallel_state.get_expert_model_parallel_group()
            counts_group = parallel_state.get_expert_tensor_and_model_parallel_group()
            to_all = counts_group, self._device, self._stats, self._timeout, distributed_c10d._get_default_store()
            hops = make_hops(self._nodes, counts_group.size() // ep_group.size(), *to_all, ep_group)
        return {"hops": hops, "layout": self._layout}

    def lines(self, report: Mapping[str, Any]) -> Sequence[str]:
        """The line on what left the nodes, where it is known how ranks lie on them."""
        num_bytes, num_tokens = report["between_nodes_bytes"], report["num_routed_tokens"]
        if not num_bytes or not num_tokens:
            return []
        rows = report["between_nodes_rows"] / num_tokens
        return [
            f"between nodes      {num_bytes / 1e6:.1f} of the {report['payload_bytes'] / 1e6:.1f} MB that a rank sends "
            f"in a step; {rows:.2f} rows of each token and layer"
        ]


def nodes_to_connect(args: argparse.Namespace, config: LancetConfig, plan: Plan, may_change: bool) -> Nodes | None:
    """The nodes between which a run makes connections for two hops; None if no plan of the run can have them.

    Args:
        args: Megatron's arguments, validated.
        plan: the run's plan, or the fallback of one that finds its plan.
        may_change: whether the run finds its plan, or profiles for one.
    """
    may_run = [plan.dispatch]
    if may_change and not plan.dispatch.needs_nodes:
        may_run += allowed_dispatches(args, config)[0]
    nodes = nodes_of(args, config) if any(one.needs_nodes for one in may_run) else None
    assert nodes is None or isinstance(nodes, Nodes), nodes
    return nodes


def unknown_nodes_note(args: argparse.Namespace, config: LancetConfig) -> str | None:
    """What to say of two hops where nothing tells which ranks share a node; None if that makes no difference."""
    if config.dispatch is not None or nodes_of(args, config) is not None:
        return None
    for one in Dispatch.known().values():
        unknown = one.blocker(layout_of(args, config, None))
        if unknown is not None and one.blocker(layout_of(args, config, SOME_NODES)) is None:
            return f"not dispatch={one}: {unknown.reason} ({FLAG} sets it)"
    return None


def check_nodes(nodes: Sequence[Nodes | None], hosts: Sequence[str]) -> None:
    """Check that all ranks assume the same nodes, and that the ranks of a node are on one host.

    Several nodes may be on one host, as in a test on one machine.

    Args:
        nodes: of each rank; None where it does without two hops.
        hosts: name of each rank's host.

    Raises:
        UsageError: a rank has other nodes than the others, or the ranks of a node are on several hosts.
    """
    advice = (
        f"Pass {FLAG} N to all ranks, the number of them that are started on each node, or choose a plan without "
        "two hops (--lancet-dispatch plain or dedup)."
    )
    if len(set(nodes)) > 1:
        ranks_by_nodes = _ranks_by([str(one) if one is not None else "no two hops" for one in nodes])
        raise UsageError(f"ranks disagree about which of them share a node: {ranks_by_nodes}. {advice}")
    if nodes[0] is None:
        return
    num_holders = parallel_state.get_expert_tensor_parallel_world_size()
    per_node = nodes[0].ranks_per_node * num_holders
    for first in range(0, len(hosts), per_node):
        found = hosts[first : first + per_node]
        if len(set(found)) > 1:
            raise UsageError(
                f"{name_ranks(range(first, first + per_node))} are taken for a node, but are on several hosts: "
                f"{_ranks_by(found, first)}. {advice}"
            )


def _ranks_by(values: Sequence[str], first: int = 0) -> str:
    """Names the ranks with each value; ``values`` starts at rank ``first``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values, start=first):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {name_ranks(same)}" for value, same in ranks.items())


NODES = NodesFeature()
