"""``--lancet-comm-sms``: SMs that a plan's all-to-alls may take, and that concurrent kernels leave free.

The default bounds messages alone: next to one, grouped products were slower with 16 free SMs than with none
(``docs/features/comm_sms.md``).
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature, Feature, RunFacts
from megatron_lancet.features.comm_sms.groups import bounded_expert_groups
from megatron_lancet.features.comm_sms.margins import (
    NCCL_LEAST,
    NCCL_MOST,
    TE_VARIABLES,
    asks_for_more,
    given_elsewhere,
    has_carveout,
    norms_leave,
    products_leave,
)
from megatron_lancet.flags import CheckedFlags, flag
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.platform.launcher import MOCKED, is_mocked

FLAG = "--lancet-comm-sms"
DEFAULT = 16
"""On Hopper and Blackwell; NVIDIA's recipes that overlap all-to-alls take 16 to 24."""
_DEFAULT_ON = (9, 10)
"""Major compute capabilities of these."""
_NCCL = "nccl"


@dataclass(frozen=True)
class CommSmsFlags(CheckedFlags):
    """The bound."""

    comm_sms: int | None = flag(
        None,
        parsed_as=int,
        at_least=1,
        metavar="N",
        advice="Without the flag it is 16 on Hopper and Blackwell; elsewhere NCCL chooses.",
        unchecked="",
        not_with_spec=": Megatron has made its process groups already. Set max_ctas of ep and tp_ep_mp in "
        "--nccl-communicator-config-path instead.",
        help="streaming multiprocessors (SMs) that an all-to-all of expert parallelism may take, at most, and that "
        "concurrent matrix products and norms leave free; a power of two. Default with a plan on Hopper and Blackwell: "
        "16 for messages, and none are left free; elsewhere, or with NCCL_MAX_CTAS, a margin of Transformer Engine, or "
        "more than 16 in NCCL_MIN_CTAS, NCCL_MIN_NCHANNELS or NCCL_MIN_P2P_NCHANNELS, NCCL chooses.",
    )


class BoundedSms(Feature):
    """``--lancet-comm-sms``."""

    name = "comm_sms"
    flags = CommSmsFlags

    def needs_plan(self, config: LancetConfig) -> bool:
        """Whether the user gives a bound."""
        return config.of(CommSmsFlags).comm_sms is not None

    def message_sms(self, config: LancetConfig, device: torch.device | None = None) -> int | None:
        """The bound: the user's, or the default of the device."""
        given = config.of(CommSmsFlags).comm_sms
        return given if given is not None else default_sms(device)

    def check(self, facts: RunFacts) -> None:
        """Refuses a bound that nothing keeps to."""
        check_comm_sms(facts.args, facts.config, facts.plan, facts.device)

    def announce(self, facts: RunFacts) -> Iterator[str]:
        """Yields the environment's line."""
        num_sms = self._acting(facts)
        if num_sms is not None:
            leave = f"and matrix products of steps with overlap leave as many free ({FLAG})"
            has_file = facts.args.nccl_communicator_config_path is not None
            unless = ", unless --nccl-communicator-config-path bounds its group" if has_file else ""
            default = f"the default here{unless}; {FLAG} changes it, and makes matrix products leave as many free"
            rest = f", {leave}" if self.needs_plan(facts.config) else f" ({default})"
            yield f"environment: an all-to-all takes at most {num_sms} SMs{rest}"
        elif facts.plan is not None and _has_default(facts.device):
            found = given_elsewhere(DEFAULT)
            yield f"environment: {found}, so all-to-alls do not get the default bound here, {DEFAULT} SMs ({FLAG})"

    def enter(self, facts: RunFacts, stack: ExitStack) -> None:
        """Bounds the groups that Megatron makes, and norms beside their messages."""
        num_sms = self._acting(facts)
        if num_sms is not None and self.needs_plan(facts.config):
            stack.enter_context(norms_leave(num_sms))
        if not is_mocked(facts.args):
            stack.enter_context(bounded_expert_groups(num_sms, not self.needs_plan(facts.config)))

    def start(self, run: Any) -> ActiveFeature | None:
        """Bounds the matrix products of steps that overlap, where the user gives a bound."""
        num_sms = self._acting(run.facts) if self.needs_plan(run.facts.config) else None
        return None if num_sms is None else _ProductsLeaveSms(run.setup, num_sms)

    def _acting(self, facts: RunFacts) -> int | None:
        """The bound of a run with messages on a GPU; None without."""
        on_gpu = facts.device is not None and facts.device.type == "cuda"
        return self.message_sms(facts.config, facts.device) if on_gpu and facts.plan is not None else None


class _ProductsLeaveSms(ActiveFeature):
    """Makes products leave SMs free in steps that overlap; in other steps that would only slow the products down."""

    def __init__(self, setup: Any, num_sms: int) -> None:
        self._setup = setup
        self._num_sms = num_sms

    def observe(self, step: Callable[[], Any]) -> Any:
        if self._setup.plan.overlaps_nothing:
            return step()
        with products_leave(self._num_sms):
            return step()


def default_sms(device: torch.device | None) -> int | None:
    """SMs of messages where the user gives none; None where that is left to NCCL.

    Args:
        device: None where it is not known.
    """
    return DEFAULT if _has_default(device) and given_elsewhere(DEFAULT) is None else None


def _has_default(device: torch.device | None) -> bool:
    """Whether messages on a device are bounded where nobody asks for something else."""
    if device is None or device.type != "cuda" or next(_obstacles_of_torch(), None):
        return False
    return torch.cuda.get_device_capability(device)[0] in _DEFAULT_ON


def check_comm_sms(
    args: argparse.Namespace, config: LancetConfig, plan: Plan | None, device: torch.device | None
) -> None:
    """Checks that NCCL, or the mocked link of a GPU, will keep to the bound.

    Args:
        args: Megatron's arguments, validated.
        plan: None for stock modules.
        device: device of this rank; None where it is not known yet, in a dry run.

    Raises:
        UsageError: the run has no such all-to-alls, or they would take more SMs, or the device has fewer.
    """
    num_sms = config.of(CommSmsFlags).comm_sms
    if num_sms is None:
        return
    given = f"{FLAG} {num_sms}"
    for reason in _obstacles(args, num_sms, plan, device):
        raise UsageError(f"{given} can't act: {reason}")


def _obstacles(args: argparse.Namespace, num_sms: int, plan: Plan | None, device: torch.device | None) -> Iterator[str]:
    if plan is None:
        yield (
            "this run has stock Megatron modules: it was given --lancet-plan off or has no expert parallelism "
            f"(--expert-model-parallel-size is {args.expert_model_parallel_size}). Drop one of the two."
        )
    mocked = is_mocked(args)
    if args.distributed_backend not in (_NCCL, MOCKED):
        yield (
            f"it bounds kernels of NCCL, and --distributed-backend is {args.distributed_backend}, whose messages take "
            "no SMs. Drop the flag."
        )
    if mocked and device is not None and device.type != "cuda":
        yield "messages of a mocked world take SMs on a GPU only, and this run is on a CPU. Drop the flag."
    if num_sms & (num_sms - 1):
        yield (
            "NCCL rounds the SMs of an all-to-all up to a power of two, "
            f"{1 << num_sms.bit_length()} here. Pass {1 << num_sms.bit_length() - 1} or {1 << num_sms.bit_length()}."
        )
    if not mocked:
        yield from _obstacles_of_the_environment(num_sms)
    if device is not None and device.type == "cuda":
        num_device_sms = torch.cuda.get_device_properties(device).multi_processor_count
        if num_sms > num_device_sms:
            yield f"the GPU has {num_device_sms} SMs. Pass fewer, or drop the flag."
        if not mocked:
            yield from _obstacles_of_torch()


def _obstacles_of_the_environment(num_sms: int) -> Iterator[str]:
    largest = os.environ.get(NCCL_MOST)
    if largest not in (None, "", str(num_sms)):
        yield f"{NCCL_MOST} is {largest}, which takes precedence in NCCL. Unset one of the two."
    for name in TE_VARIABLES:
        margin = os.environ.get(name)
        if margin not in (None, "", str(num_sms)):
            yield f"{name} is {margin}, and the flag sets it to {num_sms}. Unset one of the two."
    for name in NCCL_LEAST:
        if asks_for_more(name, num_sms):
            yield f"{name} is {os.environ[name]}, which asks for more. Unset one of the two."


def _obstacles_of_torch() -> Iterator[str]:
    if not has_carveout():
        yield (f"torch {torch.__version__} can't make matrix products leave SMs free. Install 2.11 or newer.")
    options = getattr(getattr(dist, "ProcessGroupNCCL", None), "Options", None)
    if options is None or not hasattr(getattr(options(), "config", None), "max_ctas"):
        yield (
            f"torch {torch.__version__} has no ProcessGroupNCCL.Options().config.max_ctas. Install a build of torch "
            "that has it, or set NCCL_MAX_CTAS, for all groups, instead of the flag."
        )


COMM_SMS = BoundedSms()
