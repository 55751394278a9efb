"""Puts a plan into the models that Megatron builds, the same plan on every rank."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch.distributed import distributed_c10d

from megatron_lancet.errors import UsageError
from megatron_lancet.model.gpt import LanguageModel, overlap, set_plan
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.comm_scheduler import CommScheduler
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.peers import Peers
from megatron_lancet.runtime.transport.select import make_transport
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.plan import DwPolicy, Plan
from megatron_lancet.schedule.plan_difference import plan_differences
from megatron_lancet.schedule.reductions import CommPriority, MicroOps
from megatron_lancet.schedule.wire import Wire
from megatron_lancet.training.checkpoint.ep_resize import keep_experts_apart
from megatron_lancet.training.megatron.paired_schedules import ask_for_pairs


class OverlapSetup:
    """A hook for Megatron's model builder that makes the stages of a model run by a plan, before DDP wraps them.

    Attributes:
        plan: the plan in use.
        wire: number format of hidden states in messages.
        scheduler: runs the gradient reductions; None where Megatron runs them.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        stats: CommStats,
        timeout: timedelta,
        sdpa: bool = False,
        switchable: bool = False,
        micro_ops: MicroOps | None = None,
        wire: Wire = Wire.EXACT,
    ) -> None:
        """
        Args:
            timeout: maximum wait for other ranks' messages.
            sdpa: use torch's fused attention kernel also where a plan doesn't need it.
            switchable: prepare the model for any other plan, see :meth:`switch`.
            micro_ops: cut of the gradient reductions, if all-to-alls go first; else None.
            wire: number format of hidden states in messages.
        """
        self.plan = plan
        self.wire = wire
        self.scheduler = CommScheduler(micro_ops, stats) if micro_ops is not None else None
        self._micro_ops = micro_ops
        self._sdpa = sdpa
        self._device = device
        self._stats = stats
        self._timeout = timeout
        self._switchable = switchable
        self._stages: list[LanguageModel] = []
        self._comm: Comm | None = None

    @property
    def delays_weight_grads(self) -> bool:
        """Whether linear layers are prepared for deferral; DDP's ``delay_wgrad_compute`` must have the same value.

        A plan may still compute every dW at once.
        """
        return self._switchable or self.plan.dw_policy is DwPolicy.FILL

    def __call__(self, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Called on all ranks with the unwrapped pipeline stages of this one."""
        check_same_plan(self.plan, self._micro_ops, self.wire)
        ep_group = parallel_state.get_expert_model_parallel_group()
        store = WeightGradStore.of(self.plan, self._stats) if self.delays_weight_grads else None
        counts_group = parallel_state.get_expert_tensor_and_model_parallel_group()
        transport = make_transport(ep_group, counts_group, self._device, self._stats, self._timeout)
        key_store = distributed_c10d._get_default_store()
        peers = Peers(dist.get_process_group_ranks(ep_group), dist.get_rank(), key_store, self._timeout)
        self._comm = Comm(
            transport,
            store,
            self._stats,
            own_rank=ep_group.rank(),
            peers=peers,
            scheduler=self.scheduler,
            wire=self.wire,
        )
        for stage in stages:
            assert isinstance(stage, GPTModel | HybridModel)
            overlap(stage, self.plan, self._comm, self._sdpa)
            self._stages.append(stage)
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
        check_same_plan(plan, self._micro_ops, self.wire)
        for stage in self._stages:
            set_plan(stage, plan)
        ask_for_pairs(self._stages, plan.is_paired)
        self.plan = plan

    def check_step(self, step: Callable[[], Any]) -> Any:
        """Run a training step, and assert that all its weight gradients and reductions are done."""
        result = step()
        if self.scheduler is not None:
            self.scheduler.end_step()
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

    def __init__(self, experts_apart: bool = False) -> None:
        self._experts_apart = experts_apart  # see checkpoint/ep_resize.py

    def __call__(self, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Called on all ranks with the unwrapped pipeline stages of this one; changes none of their modules."""
        check_same_plan(None)
        if self._experts_apart:
            keep_experts_apart(stages)
        return stages


def check_same_plan(plan: Plan | None, micro_ops: MicroOps | None = None, wire: Wire = Wire.EXACT) -> None:
    """Compare the plans of all ranks before the first collective that depends on them. Collective over all ranks.

    Args:
        plan: this rank's plan; None for stock modules.
        micro_ops: cut of the gradient reductions; None where Megatron runs them.
        wire: number format of hidden states in messages.

    Raises:
        UsageError: some rank has another plan; names the fields that differ, their values and the ranks.
    """
    fingerprints: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(fingerprints, f"{plan.fingerprint() if plan is not None else 'none'} {micro_ops} {wire}")
    if len(set(fingerprints)) == 1:
        return
    # JSON of everything that must be the same on all ranks, ``null`` for stock modules.
    record: dict[str, Any] | None = None
    if plan is not None:
        priority = CommPriority.OFF if micro_ops is None else CommPriority.ALL_TO_ALL_FIRST
        chunk = {} if micro_ops is None else {"grad_chunk_mb": micro_ops.chunk_bytes / 1e6}
        record = {**json.loads(plan.to_json()), "comm_priority": priority, **chunk, "wire": wire}
    plans: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(plans, json.dumps(record))
    raise UsageError(
        f"ranks disagree about the plan, and would wait for each other forever: {'; '.join(plan_differences(plans))}. "
        "Start all ranks with the same arguments and the same files."
    )
