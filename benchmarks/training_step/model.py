"""Each variant's own Megatron GPT-MoE, wrapped in Megatron's DDP; the only place that touches our runtime."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from benchmarks.harness.cases import Shape, Variant
from benchmarks.training_step.links import Link
from benchmarks.training_step.megatron_overlap import schedule_micro_batches
from megatron_lancet.features.comm_priority.comm_scheduler import CommScheduler
from megatron_lancet.features.comm_priority.grad_reduction import reductions_in_micro_ops
from megatron_lancet.features.pairing.schedules import paired_schedules
from megatron_lancet.features.shortcut.order import NAME as LATE_SUM
from megatron_lancet.model.attention.switchable import SwitchableAttention
from megatron_lancet.model.gpt import overlap
from megatron_lancet.patching import replaced
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.exchange import Handle
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.reductions import MicroOps

_SEED = 1
_LEARNING_RATE = 1e-7
"""So small that the routing stays what it was set to."""
BUCKET_PARAMETERS = 250_000
"""Of a gradient bucket, where reductions overlap: several per layer. Megatron's default would be the full model."""


class _BlockingBackward(Comm):
    """Waits for a backward all-to-all where it is launched: the schedule of a forward-only overlap."""

    def launch(self, op: Op, *args: Any, **kwargs: Any) -> Handle:
        handle = super().launch(op, *args, **kwargs)
        if op.phase is Phase.INPUT_GRAD:
            handle.wait()
        return handle


def build(shape: Shape, delays_wgrad: bool = False) -> GPTModel:
    """Builds Megatron's model, with the same weights on every call.

    Args:
        delays_wgrad: enables Megatron's delay-wgrad-compute, which its layers read when they are built.
    """
    torch.manual_seed(_SEED)
    model_parallel_cuda_manual_seed(_SEED, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        ffn_hidden_size=4 * shape.hidden,
        num_moe_experts=shape.experts,
        moe_layer_freq=[1, 0] * (shape.layers // 2) if shape.is_wired else 1,
        moe_shared_expert_intermediate_size=4 * shape.hidden if shape.is_wired else None,
        moe_router_topk=shape.topk,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",  # noqa: S106
        moe_grouped_gemm=shape.te,
        gradient_accumulation_fusion=False,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
    )
    config.delay_wgrad_compute = delays_wgrad  # not an argument: see schedule_micro_batches()
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=shape.te, normalization=config.normalization)
    return GPTModel(
        config,
        spec,
        vocab_size=shape.vocab,
        max_sequence_length=shape.seq_length,
        share_embeddings_and_output_weights=False,
    )


def prepare(
    model: GPTModel, variant: Variant, link: Link, is_wired: bool = False
) -> Callable[[], AbstractContextManager[None]]:
    """Make ``model`` run as ``variant`` says, in place, with its rows on ``link``.

    Args:
        is_wired: see :class:`Shape`; stock modules have been wired.

    Returns:
        What makes the context that a step needs.
    """
    plan = variant.plan
    if plan is None:
        if variant.overlaps_micro_batches:
            schedule_micro_batches(model.config)
        if variant.sdpa:
            for layer in model.decoder.layers:
                SwitchableAttention(layer.self_attention, recomputed=False).use_prefixed()
        return link.carries_stock
    store = WeightGradStore.of(plan, link.stats) if plan.delays_weight_grads else None
    kind = _BlockingBackward if variant.blocks_in_backward else Comm
    own_rank = parallel_state.get_expert_model_parallel_rank()
    if variant.grad_chunk_bytes is None:
        scheduler = None
    else:
        scheduler = CommScheduler(MicroOps(variant.grad_chunk_bytes), link.stats)
    comm = kind(link.transport, store, link.stats, own_rank, scheduler=scheduler, hops=link.hops)
    overlap(model, plan, comm, variant.sdpa, wiring=LATE_SUM if is_wired else "")
    return schedules_for(model, plan) if scheduler is None else partial(_reductions_by, scheduler)


def schedules_for(model: GPTModel, plan: Plan) -> Callable[[], AbstractContextManager[None]]:
    """Make Megatron run the next steps of ``model`` by the schedules that ``plan`` needs.

    Returns:
        What makes the context that a step needs.
    """
    model.decoder.comm.progress.run_by([model], plan)
    return (lambda: paired_schedules(lambda: [model])) if plan.is_paired else nullcontext


@contextmanager
def watched_lane(model: GPTModel, watch: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, forwards that are paired with a backward, on a thread of their own, do so in the context of ``watch``."""
    comm = getattr(model.decoder, "comm", None)
    if comm is None:  # stock modules
        yield
        return
    with replaced(comm.progress.lane, "on_thread", watch):
        yield


@contextmanager
def _reductions_by(scheduler: CommScheduler) -> Iterator[None]:
    with reductions_in_micro_ops(scheduler):
        yield
    scheduler.end_step()


def wrap(model: GPTModel, variant: Variant) -> DistributedDataParallel:
    """Megatron's DDP around it."""
    defers = variant.delays_wgrad or (variant.plan is not None and variant.plan.delays_weight_grads)
    config = DistributedDataParallelConfig(
        delay_wgrad_compute=defers,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=variant.overlaps_reduction,
        bucket_size=BUCKET_PARAMETERS if variant.overlaps_reduction else None,
    )
    return DistributedDataParallel(model.config, config, model)


def make_optimizer(ddp: DistributedDataParallel) -> MegatronOptimizer:
    """Megatron's Adam over all parameters, with clipping."""
    config = OptimizerConfig(optimizer="adam", lr=_LEARNING_RATE, clip_grad=1.0)
    return get_megatron_optimizer(config, [ddp], use_gloo_process_groups=False)


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens, positions and labels of a micro-batch, each [B, S]."""


def make_batches(shape: Shape, rank: int) -> list[Batch]:
    """The rank's micro-batches, in every step the same ones."""
    generator = torch.Generator().manual_seed(100 + rank)
    positions = torch.arange(shape.seq_length).expand(shape.micro_batch, -1)
    batches = []
    for _ in range(shape.micro_batches):
        tokens = torch.randint(shape.vocab, (shape.micro_batch, shape.seq_length + 1), generator=generator)
        batches.append((tokens[:, :-1], positions, tokens[:, 1:]))
    return batches


def joined(batches: Sequence[Batch]) -> Batch:
    """All samples of the micro-batches as one."""
    tokens, positions, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return tokens, positions, labels


def make_forward(module: Any, batch: Batch) -> Callable[[], torch.Tensor]:
    """A function that runs ``module`` on the micro-batch and returns the mean loss."""
    tokens, positions, labels = batch

    def forward() -> torch.Tensor:
        return module(tokens, positions, None, labels=labels).float().mean()

    return forward


def run_micro_batches(ddp: DistributedDataParallel, batches: Sequence[Batch]) -> tuple[torch.Tensor, float]:
    """All passes of a step by Megatron's own function for it.

    Returns:
        The mean loss, a scalar, and ``Sample.pairs_ms``.
    """
    losses: list[torch.Tensor] = []
    forward_ends_s: list[float] = []
    backward_begins_s: list[float] = []

    def mean_loss(losses_BS: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = losses_BS.float().mean()
        mean.register_hook(lambda _: backward_begins_s.append(time.perf_counter()))
        losses.append(mean.detach())
        forward_ends_s.append(time.perf_counter())
        return mean, {}

    def forward(given: Iterator[Batch], module: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
        tokens, positions, labels = next(given)
        run = module.build_schedule_plan if return_schedule_plan else module
        return run(tokens, positions, None, labels=labels), mean_loss

    samples, seq_length = batches[0][0].shape
    forward_backward_no_pipelining(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=ddp,
        num_microbatches=len(batches),
        seq_length=seq_length,
        micro_batch_size=samples,
    )
    assert len(forward_ends_s) == len(backward_begins_s) == len(batches)
    return torch.stack(losses).mean(), (backward_begins_s[-1] - forward_ends_s[0]) * 1e3
