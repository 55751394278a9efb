"""Puts a plan into the models that Megatron builds, the same plan on every rank."""

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch.distributed import distributed_c10d

from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature
from megatron_lancet.model.gpt import LanguageModel, overlap, set_plan
from megatron_lancet.planning.plan_difference import plan_differences
from megatron_lancet.runtime.collectives import from_all_ranks
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.peers import Peers
from megatron_lancet.runtime.transport.select import make_hops, make_transport
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.ranges import name_ranks
from megatron_lancet.training.checkpoint.ep_resize import separate_expert_grads
from megatron_lancet.training.megatron.paired_schedules import ask_for_pairs
from megatron_lancet.training.platform.launcher import FLAG as NODES_FLAG


class OverlapSetup:
    """A hook for Megatron's model builder that makes the stages of a model run by a plan, before DDP wraps them.

    Attributes:
        plan: the plan in use.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        stats: CommStats,
        timeout: timedelta,
        sdpa: bool = False,
        switchable: bool = False,
        nodes: Nodes | None = None,
        layout: Nodes | None = None,
        documents: bool = False,
        features: Sequence[ActiveFeature] = (),
        same_on_all_ranks: Mapping[str, object] | None = None,
    ) -> None:
        """
        Args:
            timeout: maximum wait for other ranks' messages.
            sdpa: use torch's fused attention kernel also where a plan doesn't need it.
            switchable: prepare the model for any other plan, see :meth:`switch`.
                nodes: how expert-parallel groups lie on nodes; None if no plan of the run has two hops.
            layout: the same for all plans of the run, to count bytes that leave a node; None if it is unknown.
            documents: whether samples are made of documents, which do not attend to each other.
            features: the run's features, which change the prepared model; read when it is built.
            same_on_all_ranks: plain values by name that all ranks must have, in addition to the plan.
        """
        self.plan = plan
        self.nodes = nodes
        self._layout = layout
        self._sdpa = sdpa
        self._documents = documents
        self._features = features
        self._same_on_all_ranks = same_on_all_ranks or {}
        self._device = device
        self._stats = stats
        self._timeout = timeout
        self._switchable = switchable
        self._stages: list[LanguageModel] = []
        self._comm: Comm | None = None

    @property
    def delays_weight_grads(self) -> bool:
        """Whether linear layers are prepared for deferral; DDP's ``delay_wgrad_compute`` must have the same value."""
        return self._switchable or self.plan.delays_weight_grads

    def __call__(self, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Called on all ranks with the unwrapped pipeline stages of this one."""
        check_same_plan(self.plan, self._same_on_all_ranks, self.nodes)
        ep_group = parallel_state.get_expert_model_parallel_group()
        store = WeightGradStore.of(self.plan, self._stats) if self.delays_weight_grads else None
        counts_group = parallel_state.get_expert_tensor_and_model_parallel_group()
        transport = make_transport(ep_group, counts_group, self._device, self._stats, self._timeout)
        key_store = distributed_c10d._get_default_store()
        hops = None
        if self.nodes is not None:
            to_all = counts_group, self._device, self._stats, self._timeout, key_store
            hops = make_hops(self.nodes, counts_group.size() // ep_group.size(), *to_all, ep_group)
        peers = Peers(dist.get_process_group_ranks(ep_group), dist.get_rank(), key_store, self._timeout)
        settings = {name: value for feature in self._features for name, value in feature.comm_settings().items()}
        self._comm = Comm(
            transport,
            store,
            self._stats,
            own_rank=ep_group.rank(),
            peers=peers,
            hops=hops,
            layout=self._layout,
            **settings,
        )
        for stage in stages:
            assert isinstance(stage, GPTModel | HybridModel)
            overlap(stage, self.plan, self._comm, self._sdpa, documents=self._documents)
            self._stages.append(stage)
        for feature in self._features:
            feature.adopt(self._stages, self._comm)
        ask_for_pairs(self._stages, self.plan.is_paired)
        return stages

    def switch(self, plan: Plan) -> None:
        """Run by another plan from the next step on. Collective over all ranks, between two steps.

        Raises:
            UsageError: some rank switches to another plan, or the plan needs what the model lacks. Nothing has
                changed then.
            AssertionError: the setup is not switchable, or weight gradients of a backward pass are still deferred.
        """
        assert self._switchable, "a model whose plan may change must be prepared before DDP wraps it"
        assert self._comm is not None, "the model is not built yet"
        assert self._comm.store is not None
        self._comm.store.assert_idle()
        check_same_plan(plan, self._same_on_all_ranks, self.nodes)
        for stage in self._stages:
            set_plan(stage, plan)
        ask_for_pairs(self._stages, plan.is_paired)
        self.plan = plan

    def check_step(self, step: Callable[[], Any]) -> Any:
        """Run a training step, and assert that all its weight gradients are done."""
        result = step()
        if self._comm is not None and self._comm.store is not None:
            self._comm.store.assert_idle()
        return result

    @property
    def stages(self) -> tuple[LanguageModel, ...]:
        """The pipeline stages of this rank; empty before the model is built."""
        return tuple(self._stages)

    @property
    def position(self) -> str:
        """The plan's collective that this rank has reached, for error messages."""
        return self._comm.position if self._comm is not None else "before the model was built"


class NoOverlap:
    """A hook for Megatron's model builder where there is no plan; it checks that no other rank has one."""

    plan = None
    delays_weight_grads = False
    position = "in Megatron's own model"

    def __init__(self, separate_expert_grads: bool = False) -> None:
        self._separates_expert_grads = separate_expert_grads  # see checkpoint/ep_resize.py

    def __call__(self, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Called on all ranks with the unwrapped pipeline stages of this one; changes none of their modules."""
        check_same_plan(None)
        if self._separates_expert_grads:
            separate_expert_grads(stages)
        return stages


def check_same_plan(
    plan: Plan | None,
    same: Mapping[str, object] | None = None,
    nodes: Nodes | None = None,
) -> None:
    """Compare the plans of all ranks before the first collective that depends on them. Collective over all ranks.

    Args:
        plan: this rank's plan; None for stock modules.
        same: further values by name that all ranks must have; None for no others.
        nodes: how expert-parallel groups lie on nodes; None without two hops.

    Raises:
        UsageError: some rank has another plan; names the fields that differ, their values and the ranks. Or ranks
            disagree about nodes, or their hosts contradict them.
    """
    own = plan.fingerprint() if plan is not None else "none"
    all_ranks = from_all_ranks((f"{own} {same}", nodes, socket.gethostname()))
    _check_nodes([nodes_there for _, nodes_there, _ in all_ranks], [host for *_, host in all_ranks])
    if len({fingerprint for fingerprint, *_ in all_ranks}) == 1:
        return
    # JSON of everything that must be the same on all ranks, ``null`` for stock modules.
    record: dict[str, Any] | None = None
    if plan is not None:
        record = {**json.loads(plan.to_json()), **(same or {})}
    plans = from_all_ranks(json.dumps(record))
    raise UsageError(
        f"ranks disagree about the plan, and would wait for each other forever: {'; '.join(plan_differences(plans))}. "
        "Start all ranks with the same arguments and the same files."
    )


def _check_nodes(nodes: Sequence[Nodes | None], hosts: Sequence[str]) -> None:
    """Check that all ranks assume the same nodes, and that the ranks of a node are on one host.

    Several nodes may be on one host, as in a test on one machine.

    Args:
        nodes: of each rank; None where it does without two hops.
        hosts: name of each rank's host.

    Raises:
        UsageError: a rank has other nodes than the others, or the ranks of a node are on several hosts.
    """
    advice = (
        f"Pass {NODES_FLAG} N to all ranks, the number of them that are started on each node, or choose a plan without "
        "two hops (--lancet-dispatch plain or dedup)."
    )
    if len(set(nodes)) > 1:
        ranks_by_nodes = _ranks_by([str(one) if one is not None else "no two hops" for one in nodes])
        raise UsageError(f"ranks disagree about which of them share a node: {ranks_by_nodes}. {advice}")
    if nodes[0] is None:
        return
    expert_tp_size = parallel_state.get_expert_tensor_parallel_world_size()
    per_node = nodes[0].ranks_per_node * expert_tp_size
    for first in range(0, len(hosts), per_node):
        found = hosts[first : first + per_node]
        if len(set(found)) > 1:
            raise UsageError(
                f"{name_ranks(range(first, first + per_node))} are taken for a node, but are on several hosts: "
                f"{_ranks_by(found, first)}. {advice}"
            )


def _ranks_by(values: Sequence[str], first: int = 0) -> str:
    """Names the ranks with each value; the first of ``values`` belongs to rank ``first``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values, start=first):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {name_ranks(same)}" for value, same in ranks.items())
