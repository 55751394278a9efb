"""A small model on two ranks and its paired step, as Megatron's schedule runs it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.runtime.trace import Trace
from megatron_lancet.schedule.plan import Plan, fixed_plan, paired
from tests.faults.paired.boundaries import Boundaries
from tests.small_gpt import EXPERTS, SEQ_LENGTH, VOCAB, small_gpt, transformer_config

NUM_MICRO_BATCHES, MICRO_BATCH = 3, 2
PLANS: dict[str, Plan] = {"one": paired(fixed_plan(1)), "mix": paired(fixed_plan(1), fixed_plan(2))}
"""By name: one chunk, and two chunks in the micro-batches at the ends."""


class PairedStep:
    """A model of two layers with experts that runs a plan, and its training step without an optimizer.

    Attributes:
        model: the model without DDP; gradients stay in ``main_grad``.
        setup: what makes it run the plan.
        boundaries: where a step may be struck.
        losses: of the last step's micro-batches, as tensors.
    """

    def __init__(
        self, plan: Plan, timeout_s: float, stack: ExitStack, overlap_grad_reduce: bool = True, **settings: Any
    ) -> None:
        """Builds the model; the process groups exist.

        Args:
            timeout_s: maximum wait for other ranks' messages.
            stack: changes Megatron for its length.
            overlap_grad_reduce: reduce gradients during the last backward, not after it.
            settings: fields of Megatron's configuration.
        """
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from megatron_lancet.features.pairing.schedules import paired_schedules
        from megatron_lancet.runtime.comm_stats import CommStats
        from megatron_lancet.training.overlap_setup import OverlapSetup

        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        ep_size = parallel_state.get_expert_model_parallel_world_size()
        config = transformer_config(**{**EXPERTS, "num_layers": 2, "expert_model_parallel_size": ep_size, **settings})
        self.model = small_gpt(config)
        device = torch.device("cpu")
        self.setup = OverlapSetup(plan, device, CommStats(device), timedelta(seconds=timeout_s))
        self.setup([self.model])
        ddp_config = DistributedDataParallelConfig(
            overlap_grad_reduce=overlap_grad_reduce,
            bucket_size=4000,
            delay_wgrad_compute=self.setup.delays_weight_grads,
        )
        self._ddp = DistributedDataParallel(config, ddp_config, self.model)
        config.no_sync_func = self._ddp.no_sync
        self.boundaries = Boundaries()
        self.losses: list[torch.Tensor] = []
        stack.enter_context(paired_schedules(lambda: self.setup.stages))
        self.boundaries.watch(stack)

    @property
    def comm(self) -> Any:
        """The model's ``Comm``."""
        return self.model.decoder.comm

    def run(self, traced: bool = True) -> list[float]:
        """One step; the losses of its micro-batches.

        Args:
            traced: record a trace, so that the ends of compute ops are boundaries.
        """
        from megatron.core.pipeline_parallel import schedules

        self.losses = []
        torch.manual_seed(5)
        self._ddp.zero_grad_buffer()
        self.comm.record_to(Trace(torch.device("cpu"), dist.get_rank()) if traced else None)
        schedules.forward_backward_no_pipelining(
            forward_step_func=self._forward_step,
            data_iterator=self._micro_batches(),
            model=[self._ddp],
            num_microbatches=NUM_MICRO_BATCHES,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH,
        )
        self._ddp.finish_grad_sync()
        self.setup.check_step(lambda: None)
        return [loss.item() for loss in self.losses]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies of all gradients, by parameter."""
        return {name: parameter.main_grad.clone() for name, parameter in self.model.named_parameters()}

    def _micro_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(100 + dist.get_rank())
        positions = torch.arange(SEQ_LENGTH).expand(MICRO_BATCH, -1)
        while True:
            self.boundaries.at("data")
            tokens = torch.randint(VOCAB, (MICRO_BATCH, SEQ_LENGTH + 1), generator=generator)
            yield {"input_ids": tokens[:, :-1], "position_ids": positions, "labels": tokens[:, 1:]}

    def _forward_step(self, data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Callable]:
        return model(attention_mask=None, **next(data)), self._loss

    def _loss(self, output_SB: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output_SB.float().mean()
        self.losses.append(loss.detach())
        self.boundaries.at("loss")
        return loss, {"lm loss": loss.detach()}
