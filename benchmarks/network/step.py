"""One variant of the training step, ready to run, and what a run of it is measured by."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist

from benchmarks.live_memory import LiveMemory
from benchmarks.network import model
from benchmarks.network.cases import Shape, Variant
from benchmarks.network.links import Link
from benchmarks.network.routing import set_expert_shares, take_expert_shares


@dataclass(frozen=True)
class Sample:
    """One step on one rank.

    Attributes:
        step_ms: all of it, from a barrier on.
        forward_ms: forward pass.
        backward_ms: backward pass.
        reduce_ms: data-parallel gradient reduction, 0 where it is not in the step.
        optimizer_ms: optimizer step, 0 where it is not in the step.
        exposed_forward_ms: time blocked in waits for payload in the forward pass.
        exposed_backward_ms: the same in the backward pass.
        counts_ms: time blocked in the exchange of token counts.
        cpu_ms: CPU time of the process, gloo's threads included.
        payload_bytes: bytes sent to the other rank in all-to-alls.
        reduced_bytes: bytes that a rank has to send for the gradient reduction.
    """

    step_ms: float
    forward_ms: float
    backward_ms: float
    reduce_ms: float
    optimizer_ms: float
    exposed_forward_ms: float
    exposed_backward_ms: float
    counts_ms: float
    cpu_ms: float
    payload_bytes: float
    reduced_bytes: float

    @property
    def exposed_ms(self) -> float:
        """Time blocked in waits, for counts too."""
        return self.exposed_forward_ms + self.exposed_backward_ms + self.counts_ms


SAMPLE_FIELDS = [field.name for field in fields(Sample)]


class Step:
    """A variant's model and everything that its step needs.

    Attributes:
        module: the model itself, without DDP.
    """

    def __init__(
        self,
        shape: Shape,
        variant: Variant,
        link: Link,
        weights: dict[str, torch.Tensor] | None,
        has_optimizer: bool = False,
    ) -> None:
        """
        Args:
            weights: to start from, and the routers' biases; None for fresh ones with the shape's expert shares.
            has_optimizer: gradient reduction and optimizer step are in the timed region too.
        """
        self.variant = variant
        self._link = link
        self.module = model.build(shape)
        rank = dist.get_rank()
        if weights is not None:
            self.module.load_state_dict(weights)
        else:
            with link.carries_stock():
                calibration = model.make_forward(self.module, shape, rank)
                set_expert_shares(self.module, calibration, shape.expert_shares())
        self._context = model.prepare(self.module, variant, link)
        self._ddp = model.wrap(self.module, variant)
        self._forward = model.make_forward(self._ddp, shape, rank)
        self._optimizer = model.make_optimizer(self._ddp) if has_optimizer else None
        self._reduced_bytes = self._reduction_bytes() if has_optimizer else 0

    def run(self, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> tuple[Sample, torch.Tensor]:
        """One step, begun together with the other rank's; the sample of this rank, and the loss.

        Args:
            around: makes a context around the timed region.
        """
        with self._context():
            self._ddp.zero_grad_buffer()
            self._link.stats.take()
            dist.barrier()
            with around():
                return self._timed()

    def _timed(self) -> tuple[Sample, torch.Tensor]:
        stats, optimizer = self._link.stats, self._optimizer
        cpu_s, start_s = time.process_time(), time.perf_counter()
        with self._ddp.no_sync() if optimizer is None else nullcontext():
            loss = self._forward()
            forward_s = time.perf_counter()
            in_forward = stats.take()
            loss.backward()
        backward_s = reduced_s = end_s = time.perf_counter()
        if optimizer is not None:
            self._ddp.finish_grad_sync()
            reduced_s = time.perf_counter()
            optimizer.step()
            end_s = time.perf_counter()
        cpu_ms = (time.process_time() - cpu_s) * 1e3
        in_backward = stats.take()
        sample = Sample(
            step_ms=(end_s - start_s) * 1e3,
            forward_ms=(forward_s - start_s) * 1e3,
            backward_ms=(backward_s - forward_s) * 1e3,
            reduce_ms=(reduced_s - backward_s) * 1e3,
            optimizer_ms=(end_s - reduced_s) * 1e3,
            exposed_forward_ms=in_forward.exposed_ms,
            exposed_backward_ms=in_backward.exposed_ms,
            counts_ms=in_forward.counts_exposed_ms + in_backward.counts_exposed_ms,
            cpu_ms=cpu_ms,
            payload_bytes=float(in_forward.payload_bytes + in_backward.payload_bytes),
            reduced_bytes=float(self._reduced_bytes),
        )
        return sample, loss.detach()

    def _reduction_bytes(self) -> int:
        """A reduce-scatter and an all-gather of the gradients of dense parameters."""
        num_ranks = dist.get_world_size()
        return sum(2 * buffer.grad_data.nbytes * (num_ranks - 1) // num_ranks for buffer in self._ddp.buffers)

    def gradients(self) -> dict[str, torch.Tensor]:
        """What the last step left in Megatron's gradient buffers, by parameter; not copied."""
        return {name: parameter.main_grad for name, parameter in self.module.named_parameters()}

    def peak_activation_bytes(self) -> int:
        """Peak memory of a step beside weights, gradients and optimizer state."""
        known = [tensor for p in self.module.parameters() for tensor in (p, p.main_grad)]
        with self._context(), LiveMemory(known) as memory:
            self._ddp.zero_grad_buffer()
            with self._ddp.no_sync():
                self._forward().backward()
        self._link.stats.take()
        return memory.peak_bytes

    def take_expert_shares(self) -> list[list[float]]:
        """Per layer, the share of routed rows of each expert since the last call. Collective."""
        return take_expert_shares(self.module)


def on_both_ranks(sample: Sample) -> list[list[float]]:
    """The samples of all ranks, in the order of :data:`SAMPLE_FIELDS`. Collective."""
    own = torch.tensor(list(asdict(sample).values()), dtype=torch.float64)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [[round(value, 4) for value in rank.tolist()] for rank in everyone]
