"""Steps of Megatron's schedule without pipeline parallelism, which runs pairs where a plan asks for them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.parity.gradients.gradients_worker import MICRO_BATCH, micro_batches
from tests.small_gpt import SEQ_LENGTH


def scheduled_step(ddp: Any, num_micro_batches: int, to_device: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    """One step of the schedule; the loss of each micro-batch."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    def mean(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = output.float().mean()
        return loss, loss.detach().clone()  # the schedule divides the first one in place

    def forward(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
        batch = {name: to_device(tensor) for name, tensor in next(batches).items()}
        return model(attention_mask=None, **batch), mean

    ddp.config.no_sync_func = ddp.no_sync
    losses = forward_backward_no_pipelining(
        forward_step_func=forward,
        data_iterator=micro_batches(num_micro_batches),
        model=ddp,
        num_microbatches=num_micro_batches,
        seq_length=SEQ_LENGTH,
        micro_batch_size=MICRO_BATCH,
    )
    ddp.finish_grad_sync()
    return [loss.item() for loss in losses]
