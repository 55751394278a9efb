"""Puts a plan into the models that Megatron builds, on every rank the same one."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_lancet.errors import UsageError
from megatron_lancet.model.gpt import overlap
from megatron_lancet.runtime.all_to_all import Comm
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport import make_transport
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.plan import DwPolicy, Plan


def overlapping(
    plan: Plan, device: torch.device, stats: CommStats
) -> Callable[[list[torch.nn.Module]], list[torch.nn.Module]]:
    """A hook for Megatron's model builder: makes the model's stages run by ``plan`` before DDP wraps them."""

    def before_wrap(stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
        check_same_plan(plan)
        ep_group = parallel_state.get_expert_model_parallel_group()
        store = WeightGradStore(plan.dw_window, stats) if plan.dw_policy is DwPolicy.FILL else None
        comm = Comm(make_transport(ep_group, device, stats), store, stats, own_rank=ep_group.rank())
        for stage in stages:
            assert isinstance(stage, GPTModel)
            overlap(stage, plan, comm)
        return stages

    return before_wrap


def check_same_plan(plan: Plan) -> None:
    """Compare the plan with all other ranks', before its first collective.

    Raises:
        UsageError: some rank has another plan; says which ranks have which.
    """
    plans: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, f"{plan.fingerprint()} {plan}")
    if len(set(plans)) > 1:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(plans))
        raise UsageError(f"ranks disagree about the plan, and would wait for each other forever. {listed}")
