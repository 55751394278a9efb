"""Puts a plan into the models that Megatron builds, the same plan on every rank."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature
from megatron_lancet.model.gpt import LanguageModel, overlap, set_plan
from megatron_lancet.planning.plan_difference import plan_differences
from megatron_lancet.runtime.collectives import from_all_ranks
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.peers import Peers
from megatron_lancet.runtime.transport.select import make_transport
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.plan import Plan


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
        features: Sequence[ActiveFeature] = (),
        same_on_all_ranks: Mapping[str, object] | None = None,
    ) -> None:
        """
        Args:
            timeout: maximum wait for other ranks' messages.
            sdpa: use torch's fused attention kernel also where a plan doesn't need it.
            switchable: prepare the model for any other plan, see :meth:`switch`.
            features: the run's features, which change the prepared model; read when it is built.
            same_on_all_ranks: plain values by name that all ranks must have, in addition to the plan.
        """
        self.plan = plan
        self._sdpa = sdpa
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
        check_same_plan(self.plan, self._same_on_all_ranks)
        for feature in self._features:
            feature.check_ranks()
        ep_group = parallel_state.get_expert_model_parallel_group()
        store = WeightGradStore.of(self.plan, self._stats) if self.delays_weight_grads else None
        counts_group = parallel_state.get_expert_tensor_and_model_parallel_group()
        transport = make_transport(ep_group, counts_group, self._device, self._stats, self._timeout)
        key_store = distributed_c10d._get_default_store()
        peers = Peers(dist.get_process_group_ranks(ep_group), dist.get_rank(), key_store, self._timeout)
        of_comm = {name: value for feature in self._features for name, value in feature.comm_settings().items()}
        of_model = {name: value for feature in self._features for name, value in feature.model_settings().items()}
        self._comm = Comm(transport, store, self._stats, own_rank=ep_group.rank(), peers=peers, **of_comm)
        for stage in stages:
            language_model = cast(LanguageModel, stage)
            overlap(language_model, self.plan, self._comm, self._sdpa, **of_model)
            self._stages.append(language_model)
        for feature in self._features:
            feature.adopt(self._stages, self._comm)
        self._comm.progress.run_by(self._stages, self.plan)
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
        check_same_plan(plan, self._same_on_all_ranks)
        for stage in self._stages:
            set_plan(stage, plan)
        self._comm.progress.run_by(self._stages, plan)
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
    stages: tuple[LanguageModel, ...] = ()
    delays_weight_grads = False
    position = "in Megatron's own model"

    def __init__(self, features: Sequence[ActiveFeature] = ()) -> None:
        """
        Args:
            features: features of the run; read when the model is built.
        """
        self._features = features

    def __call__(self, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Called on all ranks with the unwrapped pipeline stages of this one; changes none of their modules."""
        check_same_plan(None)
        for feature in self._features:
            feature.prepare_stock(stages)
        return stages


def check_same_plan(plan: Plan | None, same: Mapping[str, object] | None = None) -> None:
    """Compare the plans of all ranks before the first collective that depends on them. Collective over all ranks.

    Args:
        plan: this rank's plan; None for stock modules.
        same: further values by name that all ranks must have; None for no others.

    Raises:
        UsageError: some rank has another plan; names the fields that differ, their values and the ranks.
    """
    own = plan.fingerprint() if plan is not None else "none"
    if len(set(from_all_ranks(f"{own} {same}"))) == 1:
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
