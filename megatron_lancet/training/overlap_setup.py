"""Puts a plan into the models that Megatron builds, on every rank the same one."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.distributed import distributed_c10d

from megatron_lancet.errors import UsageError
from megatron_lancet.model.gpt import overlap
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.peers import Peers
from megatron_lancet.runtime.transport import make_transport
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.plan import DwPolicy, Plan
from megatron_lancet.schedule.plan_difference import plan_differences


class OverlapSetup:
    """A hook for Megatron's model builder: makes the stages of a model run by a plan, before DDP wraps them."""

    def __init__(
        self, plan: Plan, device: torch.device, stats: CommStats, timeout: timedelta, sdpa: bool = False
    ) -> None:
        """
        Args:
            timeout: how long a rank waits for the others' messages.
            sdpa: use torch's fused attention kernel also where the plan doesn't need it.
        """
        self._sdpa = sdpa
        self._plan = plan
        self._device = device
        self._stats = stats
        self._timeout = timeout
        self._comm: Comm | None = None

    def __call__(self, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Called on all ranks with the unwrapped pipeline stages of this one."""
        check_same_plan(self._plan)
        ep_group = parallel_state.get_expert_model_parallel_group()
        fills = self._plan.dw_policy is DwPolicy.FILL
        store = WeightGradStore(self._plan.dw_window, self._stats, self._plan.dw_memory_bytes) if fills else None
        counts_group = parallel_state.get_expert_tensor_and_model_parallel_group()
        transport = make_transport(ep_group, counts_group, self._device, self._stats, self._timeout)
        peers = Peers(
            dist.get_process_group_ranks(ep_group),
            dist.get_rank(),
            distributed_c10d._get_default_store(),
            self._timeout,
        )
        self._comm = Comm(transport, store, self._stats, own_rank=ep_group.rank(), peers=peers)
        for stage in stages:
            assert isinstance(stage, GPTModel)
            overlap(stage, self._plan, self._comm, self._sdpa)
        return stages

    def check_step(self, step: Callable[[], Any]) -> Any:
        """Run a training step, and assert that no weight gradient of it is left behind."""
        result = step()
        if self._comm is not None and self._comm.store is not None:
            self._comm.store.assert_idle()
        return result

    @property
    def position(self) -> str:
        """Where this rank stands among the plan's collectives."""
        return self._comm.position if self._comm is not None else "before the model was built"


class NoOverlap:
    """A hook for Megatron's model builder where there is no plan: finds out whether some rank has one."""

    position = "in Megatron's own model"

    def __call__(self, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Called on all ranks; changes nothing."""
        check_same_plan(None)
        return stages


def check_same_plan(plan: Plan | None) -> None:
    """Compare the plan with all other ranks', before its first collective. Collective over all ranks.

    Args:
        plan: None for stock modules.

    Raises:
        UsageError: some rank has another plan; says which ranks have which value of which field.
    """
    fingerprints: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(fingerprints, plan.fingerprint() if plan is not None else "none")
    if len(set(fingerprints)) == 1:
        return
    plans: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(plans, plan.to_json() if plan is not None else "null")
    raise UsageError(
        f"ranks disagree about the plan, and would wait for each other forever: {'; '.join(plan_differences(plans))}. "
        "Start all ranks with the same arguments and the same files."
    )
