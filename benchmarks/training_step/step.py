"""One variant of the training step, ready to run."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.harness.cases import Shape, Variant
from benchmarks.training_step import model
from benchmarks.training_step.links import Link
from benchmarks.training_step.live_memory import LiveMemory
from benchmarks.training_step.megatron_overlap import StreamThreads
from benchmarks.training_step.placed import bring_gradients_home, place
from benchmarks.training_step.routing import SentRows, count_sent_rows, set_expert_shares, take_expert_shares
from benchmarks.training_step.sample import Sample
from megatron_lancet.features.shortcut.model import wire
from megatron_lancet.model.gpt import set_plan
from megatron_lancet.runtime.comm_stats import CommTimes
from megatron_lancet.schedule.plan import Plan


class Step:
    """A variant's model and everything that its step needs.

    Attributes:
        shape: of the model and its micro-batches.
        variant: that it runs.
        module: the model itself, without DDP.
    """

    def __init__(
        self,
        shape: Shape,
        variant: Variant,
        link: Link,
        weights: dict[str, torch.Tensor] | None,
        has_optimizer: bool = False,
        placements: Sequence[Sequence[int]] = (),
    ) -> None:
        """
        Args:
            weights: to start from, and the routers' biases; None for fresh ones with the shape's expert shares.
            has_optimizer: gradient reduction and optimizer step are in the timed region too.
            placements: the expert of each place, by layer; empty for Megatron's.
        """
        self.shape = shape
        self.variant = variant
        self._link = link
        self.module = model.build(shape, variant.delays_wgrad)
        batches = model.make_batches(shape, dist.get_rank())
        if shape.is_wired and variant.plan is None:
            wire([self.module])
        if weights is not None:
            self.module.load_state_dict(weights)
        else:
            with link.carries_stock():
                calibration = model.make_forward(self.module, model.joined(batches))
                set_expert_shares(self.module, calibration, shape.expert_shares())
        self._context = model.prepare(self.module, variant, link, shape.is_wired)
        if placements:
            place(self.module, placements)
        self._streams = StreamThreads(link.stats) if variant.overlaps_micro_batches else None
        self._ddp = model.wrap(self.module, variant)
        self._forward = model.make_forward(self._ddp, batches[0]) if len(batches) == 1 else None
        self._accumulate = partial(model.run_micro_batches, self._ddp, batches)
        self._optimizer = model.make_optimizer(self._ddp) if has_optimizer else None
        self._reduced_bytes = self._reduction_bytes() if has_optimizer else 0

    def run_by(self, plan: Plan) -> None:
        """Switch to another plan from the next step on. Call between steps, on all ranks.

        A step by a plan that defers weight gradients needs a variant that also does so.
        """
        assert self.variant.plan is not None, "stock modules run no plan"
        assert self.variant.grad_chunk_bytes is None, "reductions in micro-ops need a context of their own"
        set_plan(self.module, plan)
        self._context = model.schedules_for(self.module, plan)

    def run(self, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> tuple[Sample, torch.Tensor]:
        """One step, begun together with the other ranks; the sample of this rank, and the loss.

        Args:
            around: makes a context around the timed region.
        """
        with self._running():
            self._ddp.zero_grad_buffer()
            self._link.stats.take()
            self._link.take_sent_bytes()
            dist.barrier()
            with around():
                return self._timed()

    @contextmanager
    def _running(self, threaded: bool = True) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._context())
            if self._streams is not None:
                stack.enter_context(self._streams.stand_for_streams(threaded))
            yield

    def _timed(self) -> tuple[Sample, torch.Tensor]:
        stats, optimizer = self._link.stats, self._optimizer
        cpu_s, start_s = time.process_time(), time.perf_counter()
        with self._ddp.no_sync() if optimizer is None else nullcontext():
            loss, forward_s, in_forward, pairs_ms = self._passes()
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
            forward_ms=0.0 if forward_s is None else (forward_s - start_s) * 1e3,
            backward_ms=(backward_s - (start_s if forward_s is None else forward_s)) * 1e3,
            pairs_ms=pairs_ms,
            reduce_ms=(reduced_s - backward_s) * 1e3,
            optimizer_ms=(end_s - reduced_s) * 1e3,
            exposed_forward_ms=in_forward.exposed_ms,
            exposed_backward_ms=in_backward.exposed_ms,
            counts_ms=in_forward.counts_exposed_ms + in_backward.counts_exposed_ms,
            cpu_ms=cpu_ms,
            payload_bytes=float(self._link.take_sent_bytes()),
            reduced_bytes=float(self._reduced_bytes),
        )
        return sample, loss

    def _passes(self) -> tuple[torch.Tensor, float | None, CommTimes, float]:
        """All passes of the step: the loss, when the forward pass ended, the communication until then, ``pairs_ms``.

        With several micro-batches there is no such moment: None, and nothing.
        """
        if self._forward is None:
            loss, pairs_ms = self._accumulate()
            return loss, None, CommTimes(), pairs_ms
        loss = self._forward()
        forward_s = time.perf_counter()
        in_forward = self._link.stats.take()
        loss.backward()
        return loss.detach(), forward_s, in_forward, 0.0

    def _reduction_bytes(self) -> int:
        """A reduce-scatter and an all-gather of the gradients of dense parameters."""
        num_ranks = dist.get_world_size()
        return sum(2 * buffer.grad_data.nbytes * (num_ranks - 1) // num_ranks for buffer in self._ddp.buffers)

    def gradients(self) -> dict[str, torch.Tensor]:
        """What the last step left in Megatron's gradient buffers, by parameter of a stock rank; not copied."""
        bring_gradients_home(self.module)
        return {name: parameter.main_grad for name, parameter in self.module.named_parameters()}

    def peak_activation_bytes(self) -> int:
        """Peak memory of a step without weights, gradients and optimizer state."""
        known = [tensor for p in self.module.parameters() for tensor in (p, p.main_grad)]
        memory = LiveMemory(known)
        # Communication runs on the main thread meanwhile; forwards of a plan with pairing have a thread of their own.
        watched = model.watched_lane(self.module, memory.watches_this_thread)
        with self._running(threaded=False), watched, memory.watches_this_thread():
            self._ddp.zero_grad_buffer()
            with self._ddp.no_sync():
                self._passes()
        self._link.stats.take()
        return memory.peak_bytes

    def take_expert_shares(self) -> list[list[float]]:
        """Per layer, the share of routed rows of each expert since the last call. Collective."""
        return take_expert_shares(self.module)

    def count_sent_rows(self) -> SentRows:
        """Rows of all ranks in the dispatches of a step, which runs for it; of stock modules. Collective."""
        assert self.variant.plan is None, "our router chooses chunk by chunk"
        return count_sent_rows(self.module, self._link.ranks_per_node, self.run)
