"""The first of two pipeline stages under Megatron's 1F1B schedule, with a second stage that returns what it gets.

The mocked world has no second stage: the gradients that come back are the outputs that were sent. That is no training,
but the same for stock and for us.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.patching import replaced
from megatron_lancet.testkit.mock.mock_group import MockProcessGroup
from megatron_lancet.testkit.mock.transfer import Transfer
from tests.parity.gradients import gradients_worker
from tests.parity.gradients.gradients_worker import MICRO_BATCH, NUM_MICRO_BATCHES, micro_batches
from tests.small_gpt import SEQ_LENGTH, small_gpt

PIPELINE: dict[str, Any] = {
    "num_layers": 4,
    "pipeline_dtype": torch.float32,
    "batch_p2p_comm": False,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}
"""Settings of the model. Sends and receives of a batch would need a process group that coalesces them."""


@dataclass(frozen=True)
class _Sent(Transfer):
    """Rows that the other stage receives; the event behind them is added to ``events``."""

    events: list[Any] = field(default_factory=list)

    def deliver(self) -> None:
        super().deliver()
        self.events.append(torch.cuda.current_stream().record_event())


@dataclass(frozen=True)
class _Received(Transfer):
    """Rows that the other stage sends back: it has received them before, at ``events``."""

    events: list[Any] = field(default_factory=list)

    def deliver(self) -> None:
        for event in self.events:
            torch.cuda.current_stream().wait_event(event)
        super().deliver()


@contextmanager
def first_stage() -> Iterator[None]:
    """Inside the context models are first stages, and receives return what was sent, in order."""
    on_wire: deque[tuple[torch.Tensor, list[Any]]] = deque()
    kept: list[torch.Tensor] = []  # the other stage's memory

    def send(group: Any, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        wire = torch.empty_like(tensors[0])
        events: list[Any] = []
        kept.append(wire)
        on_wire.append((wire, events))

        work: dist.Work = group._issue("send", _Sent([(wire, tensors[0])], events=events), wire.nbytes, None)
        return work

    def receive(group: Any, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        wire, events = on_wire.popleft()
        work: dist.Work = group._issue("receive", _Received([(tensors[0], wire)], events=events), wire.nbytes, None)
        return work

    with (
        replaced(MockProcessGroup, "send", send),
        replaced(MockProcessGroup, "recv", receive),
        replaced(gradients_worker, "small_gpt", partial(small_gpt, post_process=False)),
    ):
        yield
    assert not on_wire


def pipeline_step(ddp: Any, to_device: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    """One step of the schedule; the mean output of the stage for each micro-batch."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving

    means: list[torch.Tensor] = []

    def forward(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
        batch = {name: to_device(tensor) for name, tensor in next(batches).items() if name != "labels"}
        output = model(attention_mask=None, **batch)
        means.append(output.detach().mean())
        return output, None

    ddp.config.no_sync_func = ddp.no_sync
    forward_backward_pipelining_without_interleaving(
        forward_step_func=forward,
        data_iterator=micro_batches(),
        model=ddp,
        num_microbatches=NUM_MICRO_BATCHES,
        seq_length=SEQ_LENGTH,
        micro_batch_size=MICRO_BATCH,
    )
    ddp.finish_grad_sync()
    return [mean.item() for mean in means]
