"""Micro-batches, forward and backward, on rank 0 of a mocked world: the log of a virtual GPU without values."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_lancet.lab.modelled_step.kernels import kernels_of_a_gpu
from megatron_lancet.model.attention.switchable import SwitchableAttention
from megatron_lancet.registry import position_class
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.testkit.mock.mock_world import mock_world
from megatron_lancet.testkit.virtual_gpu.log import Entry, Mark
from megatron_lancet.testkit.virtual_gpu.megatron import virtual_gpu_platform
from megatron_lancet.testkit.virtual_gpu.meta import META, MetaGpu, Supply
from megatron_lancet.testkit.virtual_gpu.playback.marks import SKIP, MarkedMessage, MarkedTrace
from megatron_lancet.training.arguments import megatrons_refusals
from megatron_lancet.training.megatron import patches
from megatron_lancet.training.megatron.mock_patches import loopback_counts
from megatron_lancet.training.megatron.models import build_plain_gpt
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.plan.attention import needs_own_attention

BACKWARD = "backward"
"""Name of the mark between the passes.

What runs behind it is a backward pass, but for turns of forwards paired with it.
"""

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Recording:
    """The work enqueued by one micro-batch, or by a step in pairs.

    Attributes:
        messages: all-to-alls of a plan; empty for stock modules.
    """

    log: Sequence[Entry]
    messages: Sequence[MarkedMessage]
    num_micro_batches: int = 1


@contextmanager
def gpu_without_values(num_ranks: int, supply: Supply, **parallel_sizes: int) -> Iterator[MetaGpu]:
    """Inside the context Megatron runs on a :class:`MetaGpu` that is rank 0 of a mocked world of ``num_ranks``.

    Enter it inside ``cpu_platform()``.

    Args:
        supply: the values that the host has, see :class:`MetaGpu`.
        parallel_sizes: arguments of Megatron's ``initialize_model_parallel``.
    """
    with mock_world(num_ranks), loopback_counts(), ExitStack() as stack:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **parallel_sizes)
        stack.callback(parallel_state.destroy_model_parallel)
        gpu = MetaGpu(supply)
        stack.enter_context(virtual_gpu_platform(gpu))
        stack.enter_context(kernels_of_a_gpu(gpu))
        yield gpu


def record(args: argparse.Namespace, plan: Plan | None, num_micro_batches: int = 1) -> Recording:
    """Builds the model and records its second micro-batch, or step. Enter it inside ``cpu_platform()``.

    Args:
        args: Megatron's validated arguments.
        plan: None for Megatron's own modules, which wait for each all-to-all.
        num_micro_batches: of the step if the plan has pairs; 1 without.

    Raises:
        UsageError: Megatron refuses the arguments, or the model can't run the plan.
        NotImplementedError: the host needs a value that is not known.
    """
    with ExitStack() as stack:
        gpu = stack.enter_context(
            gpu_without_values(
                args.world_size,
                uniform_routing(args.num_experts, args.moe_router_topk),
                tensor_model_parallel_size=args.tensor_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                expert_model_parallel_size=args.expert_model_parallel_size,
                expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            )
        )
        stack.enter_context(patches.sequence_parallel_with_torch_norm())
        stack.enter_context(patches.fused_core_attention(needs_own_attention(args) is not None))
        if plan is not None:
            stack.enter_context(patches.dropped_outputs())
        return _record(args, plan, gpu, num_micro_batches)


def _record(args: argparse.Namespace, plan: Plan | None, gpu: MetaGpu, num_micro_batches: int) -> Recording:
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    with torch.device(META), megatrons_refusals():
        model = build_plain_gpt(args).cuda()
    setup = None
    if plan is not None:
        device = torch.device("cuda")
        setup = OverlapSetup(plan, device, CommStats(device), _TIMEOUT, sdpa=True)
        setup([_unwrapped(model)])
    else:
        for layer in _unwrapped(model).decoder.layers:
            SwitchableAttention(layer.self_attention, False).use_prefixed()
    config = _unwrapped(model).config
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
            delay_wgrad_compute=setup is not None and setup.delays_weight_grads,
        ),
        model,
    )
    trace = MarkedTrace(gpu)

    def loss_of(model: Any) -> torch.Tensor:
        length = args.seq_length // args.context_parallel_size
        tokens = torch.zeros((args.micro_batch_size, length), dtype=torch.int64, device=META)
        output = model(input_ids=tokens, position_ids=tokens, attention_mask=None, labels=tokens)
        loss: torch.Tensor = output.float().mean()
        return loss

    def step() -> None:
        if setup is not None and setup.plan.is_paired:
            gpu.note(Mark(SKIP, BACKWARD))
            with position_class().steps(lambda: setup.stages):
                _paired_step(ddp, loss_of, num_micro_batches)
            return
        loss = loss_of(ddp)
        gpu.note(Mark(SKIP, BACKWARD))
        loss.backward()

    with ddp.no_sync():
        with gpu.watch():
            step()  # the first one makes caches and copies that later ones find
        if setup is not None:
            setup.stages[0].decoder.comm.record_to(trace)
        with gpu.watch():
            step()
    return Recording(tuple(gpu.log), tuple(trace.messages), num_micro_batches)


def _paired_step(ddp: Any, loss_of: Callable[[Any], torch.Tensor], num_micro_batches: int) -> None:
    """A step of Megatron's schedule, which runs pairs."""

    def forward_step(batches: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
        return loss_of(model), lambda loss: (loss, {})

    schedules.forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter(()),
        model=ddp,
        num_microbatches=num_micro_batches,
        seq_length=1,  # the schedule without stages makes no use of sizes
        micro_batch_size=1,
    )


def _unwrapped(model: Any) -> Any:
    return getattr(model, "module", model)


def uniform_routing(num_experts: int, topk: int) -> Callable[[str, Sequence[Any]], torch.Tensor | None]:
    """Token counts of a router that sends as many tokens to each expert as to any other."""

    def supply(name: str, args: Sequence[Any]) -> torch.Tensor | None:
        if name != "sum" or not args or args[0].dim() != 2 or args[0].size(1) != num_experts:
            return None
        if args[0].dtype is not torch.bool or len(args) < 2 or list(args[1]) != [0]:
            return None
        num_rows = args[0].size(0) * topk
        counts = torch.full((num_experts,), num_rows // num_experts)
        counts[: num_rows % num_experts] += 1
        return counts

    return supply
