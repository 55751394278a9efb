"""The same step under each schedule: Megatron's own, and the overlapping block's with several plans."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.sizes import Size, transformer_config
from megatron_lancet.features.cuda_graphs.feature import ActiveGraphs
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.patching import replaced
from megatron_lancet.runtime.comm_stats import CommStats, CommTimes
from megatron_lancet.runtime.device import on_cuda
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, fixed_plan, paired

if TYPE_CHECKING:
    from megatron_lancet.runtime.comm import Comm
    from megatron_lancet.training.overlap_setup import OverlapSetup

STOCK = "stock"
MEGATRON_OVERLAP = "megatron 1f1b"
PLANS: dict[str, Plan | None] = {
    STOCK: None,
    **{f"experts k={k}": fixed_plan(k, DwPolicy.NONE, overlap_range=OverlapRange.EXPERTS) for k in (2, 4)},
    **{f"ours k={k}": fixed_plan(k) for k in (1, 2, 4)},
    "ours k=2 sequence": fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE),
    "pairs": paired(fixed_plan(1)),
    "tiles": fixed_plan(1, tiles=1),
    "dedup": fixed_plan(1, dispatch=DEDUP),
    "dedup pairs": paired(fixed_plan(1, dispatch=DEDUP)),
    MEGATRON_OVERLAP: None,
}
"""Plans by the variant's name; None where Megatron's own modules run."""
GRAPHS = ", graphs"
"""Suffix of a variant's name: attention and routing are captured."""
_OVERLAP = {"overlap_moe_expert_parallel_comm": True}
_GROUPED = {"moe_grouped_gemm": True, "gradient_accumulation_fusion": False}
_TIMEOUT = timedelta(minutes=5)
_BUCKET_SIZE = 20_000
"""Parameters whose gradients are reduced together: the smallest model has several such buckets."""


class Reduction(StrEnum):
    """How data-parallel ranks add their gradients up, bucket by bucket while the backward runs."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    """As the distributed optimizer needs it: each rank gets the sums of its own part."""

    @property
    def ddp(self) -> dict[str, Any]:
        """Fields of Megatron's ``DistributedDataParallelConfig``."""
        return {
            "overlap_grad_reduce": True,
            "bucket_size": _BUCKET_SIZE,
            "use_distributed_optimizer": self is Reduction.REDUCE_SCATTER,
        }


@dataclass(frozen=True)
class Work:
    """What every variant does in a step: forward and backward of some micro-batches.

    Attributes:
        num_ranks: of the expert-parallel group.
        bf16: precision of weights and activations, else fp32.
        rank: draws the data, which differ from rank to rank.
        reduction: of gradients, at the end of each step; None for none.
        te: Transformer Engine's layers, with grouped experts; else Megatron's local ones.
    """

    size: Size
    num_ranks: int
    num_micro_batches: int
    device: torch.device
    bf16: bool = True
    rank: int = 0
    reduction: Reduction | None = None
    te: bool = False


@dataclass(frozen=True)
class Variant:
    """A schedule, and what a model has for it.

    Attributes:
        plan: None for Megatron's own modules.
        config: fields of Megatron's ``TransformerConfig`` that differ.
        ddp: the same of its ``DistributedDataParallelConfig``.
        plans_switch: whether the model is prepared for other plans.
        nodes: how the ranks lie on nodes, for plans with two hops.
        is_captured: whether attention and routing are replayed from CUDA graphs, from the second step on.
    """

    plan: Plan | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    plans_switch: bool = False
    nodes: Nodes | None = None
    is_captured: bool = False

    @staticmethod
    def named(name: str) -> "Variant":
        """The variant of a name in :data:`PLANS`; :data:`GRAPHS` at its end captures attention and routing."""
        plan = PLANS[name.removesuffix(GRAPHS)]
        return Variant(plan, _OVERLAP if name == MEGATRON_OVERLAP else {}, is_captured=name.endswith(GRAPHS))


def why_megatron_refuses(work: Work) -> str | None:
    """Why this Megatron refuses the configuration of its own overlap; None where it accepts it."""
    try:
        transformer_config(work.size, work.num_ranks, work.bf16, **_OVERLAP)
    except (AssertionError, ImportError, ValueError) as refusal:
        text = str(refusal).strip() or "no message"
        return f"{type(refusal).__name__}: {text.splitlines()[0]}"
    return None


class Runner:
    """A model under one schedule. Every other runner of the same work has the same weights and data.

    Attributes:
        setup: what the model's plan was set up with; None where Megatron's own modules run.
        config: Megatron's configuration.
        is_captured: see :class:`Variant`.
    """

    def __init__(self, variant: Variant, work: Work) -> None:
        from megatron.core.transformer.module import Float16Module

        self._work = work
        self._plan = variant.plan
        self._schedules_pairs = variant.plan is None and bool(_OVERLAP.items() & variant.config.items())
        self._stats = CommStats(work.device)
        of_layers = _GROUPED if work.te else {}
        self.config = transformer_config(work.size, work.num_ranks, work.bf16, **of_layers, **variant.config)
        model = _build(self.config, work.size, work.te)
        self.setup = _prepare(model, variant, work, self._stats)
        self.is_captured = variant.is_captured
        self._graphs = ActiveGraphs(self.setup, lambda: variant.is_captured, num_warmup_steps=1)
        deferred = self.setup is not None and self.setup.delays_weight_grads
        self._parameters = dict(model.named_parameters())
        self._modules = tuple(model.modules())
        self._stack = model.decoder
        wrapped = Float16Module(self.config, model.cuda()) if work.bf16 else model.cuda()
        reduction = {} if work.reduction is None else work.reduction.ddp
        ddp = {"grad_reduce_in_fp32": True, "delay_wgrad_compute": deferred, **reduction, **variant.ddp}
        self._model = _with_ddp(self.config, wrapped, ddp)
        self._batches = list(_micro_batches(work))

    @property
    def layers(self) -> Any:
        """The transformer layers, as Megatron built them."""
        return self._stack.layers

    @property
    def has_experts(self) -> list[bool]:
        """Of each layer, whether it has experts."""
        return [bool(has) for has in self.config.moe_layer_freq]

    @property
    def num_micro_batches(self) -> int:
        """Of a step."""
        return self._work.num_micro_batches

    @property
    def comm(self) -> "Comm | None":
        """Launches the all-to-alls of the plan; None where Megatron's own modules run."""
        return None if self.setup is None else self._stack.comm

    def copy_weights(self, other: "Runner") -> None:
        """Takes over the weights of another runner, exactly where this one's precision is not lower."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(other._parameters[name])

    def reset_gradients(self) -> None:
        """To be called before each step."""
        self._model.zero_grad_buffer()

    def step(self, num_samples: int | None = None) -> list[torch.Tensor]:
        """Forward and backward by Megatron's own function for it; gradients are added to ``main_grad``.

        Args:
            num_samples: the first ones of each micro-batch; None for all.

        Returns:
            The loss of each micro-batch, on the device.
        """
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        batches = [tuple(tensor[:num_samples] for tensor in batch) for batch in self._batches]

        def run() -> list[dict[str, torch.Tensor]]:
            losses: list[dict[str, torch.Tensor]] = forward_backward_no_pipelining(
                forward_step_func=self._forward,
                data_iterator=iter(batches),
                model=self._model,
                num_microbatches=self._work.num_micro_batches,
                seq_length=self._work.size.seq_length,
                micro_batch_size=self._work.size.micro_batch,
            )
            if self._work.reduction is not None:
                self.finish_reductions()
            return losses

        with self._patches():
            setup = self.setup
            losses = run() if setup is None else self._graphs.observe(lambda: setup.check_step(run))
        return [loss["loss"] for loss in losses]

    def finish_reductions(self) -> None:
        """Waits for the reductions of gradients that DDP has begun in a step, or makes them now."""
        self._model.finish_grad_sync()

    def switch(self, plan: Plan) -> None:
        """Runs by another plan from the next step on; on all ranks."""
        assert self.setup is not None, "stock has no plan"
        self.setup.switch(plan)

    @property
    def position(self) -> str:
        """The collective that this rank has reached, for reports of a rank that hangs."""
        return "in Megatron's own modules" if self.setup is None else str(self.setup.position)

    def num_reports(self) -> list[int]:
        """How often each weight with a deferred gradient was reported to DDP since the model was built."""
        deferred = [module.deferred for module in self._modules if getattr(module, "deferred", None)]
        return [weight.num_reported for weight in deferred]

    def num_replayed(self) -> int:
        """Micro-batches that were replayed from graphs so far."""
        return sum(stage.num_replayed for stage in self._graphs.stages)

    def take_times(self) -> CommTimes:
        """Communication since the last call. On CUDA, stock's is not in it."""
        return self._stats.take()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of every parameter, by name; not copies."""
        return {name: parameter.main_grad for name, parameter in self._parameters.items()}

    def _forward(self, batches: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
        tokens, positions, labels = next(batches)
        run = model.build_schedule_plan if return_schedule_plan else model
        return run(tokens, positions, None, labels=labels), _mean_loss

    def _patches(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if self.setup is not None and self.setup.plan.is_paired:
            from megatron_lancet.features.pairing.schedules import paired_schedules

            setup = self.setup
            stack.enter_context(paired_schedules(lambda: setup.stages))
        if self._work.device.type == "cuda":
            return stack
        from megatron_lancet.training.megatron.patches import measured_stock_communication

        if self._plan is None:
            stack.enter_context(measured_stock_communication(self._stats))
        if self._schedules_pairs:
            # It tells the allocator which streams use a tensor. A CPU has neither.
            stack.enter_context(replaced(torch.Tensor, "record_stream", lambda *_: None))
        return stack


def _build(config: Any, size: Size, te: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_lancet.training.megatron.patches import fused_core_attention

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    with fused_core_attention(size.latent and not te):
        return GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=te, normalization=config.normalization),
            vocab_size=size.vocab,
            max_sequence_length=size.seq_length,
            position_embedding_type="rope" if size.modern else "learned_absolute",
        )


def _with_ddp(config: Any, model: Any, ddp: Mapping[str, Any]) -> Any:
    """The model under Megatron's DDP, as Megatron's training wraps it: on a stream of its own.

    Autograd runs DDP's hooks on that stream.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(**ddp)
    with _side_stream() if on_cuda(next(model.parameters())) else nullcontext():
        wrapped = DistributedDataParallel(config, ddp_config, model)
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = wrapped.no_sync
    return wrapped


@contextmanager
def _side_stream() -> Iterator[None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _prepare(model: Any, variant: Variant, work: Work, stats: CommStats) -> "OverlapSetup | None":
    """Gives the model its plan; the plan's ``OverlapSetup``. All variants use the same fused attention."""
    from megatron_lancet.features.two_hop.feature import ActiveNodes
    from megatron_lancet.model.attention.switchable import SwitchableAttention
    from megatron_lancet.training.overlap_setup import OverlapSetup

    if variant.plan is not None:
        nodes = [ActiveNodes(variant.nodes, work.device, stats, _TIMEOUT)]
        setup = OverlapSetup(
            variant.plan, work.device, stats, _TIMEOUT, not work.te, variant.plans_switch, features=nodes
        )
        setup([model])
        return setup
    for layer in () if work.te else model.decoder.layers:
        SwitchableAttention(layer.self_attention, recomputed=False).use_prefixed()
    return None


def _micro_batches(work: Work) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens, positions and labels, each [B, S]."""
    size = work.size
    generator = torch.Generator().manual_seed(1 + work.rank)
    positions = torch.arange(size.seq_length).expand(size.micro_batch, -1)
    for _ in range(work.num_micro_batches):
        tokens = torch.randint(size.vocab, (size.micro_batch, size.seq_length + 1), generator=generator)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        yield inputs.cuda(), positions.contiguous().cuda(), labels.cuda()


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mean = losses.float().mean()
    return mean, {"loss": mean.detach()}
