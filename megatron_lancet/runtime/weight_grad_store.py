"""Defers weight gradients (dW) into a bounded queue that is drained while all-to-alls are in flight.

:class:`~megatron_lancet.schedule.dw_queue.DwQueue` decides which dW runs when, and when a weight is reported; the store
holds the closures, runs them, and reports to DDP.

The time at which a dW *is computed* may depend on the clock, because that is local work. The time at which a parameter
*is reported ready* must not: the report starts a gradient reduction, a collective, so it has a fixed place in the
backward pass, the same on every rank. (Lancet, section 4.1, places dWs; the order of DDP's reductions is added here.)
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from operator import attrgetter

import torch

from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.device import on_cuda
from megatron_lancet.runtime.factors import PartOfRows
from megatron_lancet.runtime.recorder import Recorder
from megatron_lancet.schedule.dw_queue import DwQueue, DwRules
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.plan import Plan


class DeferredWeight:
    """A parameter whose gradient is computed by the store instead of autograd.

    On CUDA it is created on the stream on which autograd runs DDP's hooks of other parameters: Megatron wraps a model
    on a stream of its own, and an accumulation node keeps the stream that was current when it was made. Reports are
    also made on this stream, behind the dWs, so all of DDP's work on a bucket is on one stream, as in stock.

    Attributes:
        parameter: the parameter.
        name: name of the dW op, for example ``L3.W.linear_fc1``.
        num_pending: dWs that were put but have not run.
        num_reported: number of reports to DDP; for tests and assertions.
        ddp_stream: stream of DDP's kernels; None on a CPU.
        dw_stream: stream of the last dW; None on a CPU, and before the first dW.
    """

    def __init__(self, parameter: torch.nn.Parameter, name: str, report_ready: Callable[[], None]) -> None:
        """
        Args:
            report_ready: DDP's function that registers the gradient as complete.
        """
        self.name = name
        self.num_pending = 0
        self.num_reported = 0
        self.parameter = parameter
        self._sum: torch.Tensor | None = None
        self._report_ready = report_ready
        self.ddp_stream = torch.cuda.current_stream() if on_cuda(parameter) else None
        self.dw_stream: torch.cuda.Stream | None = None

    @property
    def main_grad(self) -> torch.Tensor:
        """Megatron's gradient accumulator, shaped like the weight."""
        main_grad: torch.Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        return main_grad

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradient."""
        return self.main_grad.nbytes

    def add_to_main_grad(self, weight_grad: torch.Tensor, sum_first: bool = False) -> None:
        """Adds one chunk's dW, shaped like the weight, to Megatron's gradient accumulator.

        Args:
            sum_first: sum the dWs of all uses of the weight in a micro-batch before they are added, as autograd does.
        """
        if not sum_first:
            self.main_grad.add_(weight_grad)
        else:
            self._sum = weight_grad if self._sum is None else self._sum.add_(weight_grad)

    def add_product(
        self, grad_TO: torch.Tensor, input_TI: torch.Tensor, in_gemm: bool = False, sum_first: bool = False
    ) -> None:
        """Computes one chunk's dW, [O, I], from T tokens and adds it to Megatron's gradient accumulator.

        Args:
            in_gemm: let the GEMM add to the gradient where the types agree, or where the device has a GEMM that adds
                a product of bf16 or fp16 to fp32. This is faster and needs no temporary of the weight's size
                (benchmarks/RESULTS.md), but changes stock's order of additions and does not round the product first.
            sum_first: see :meth:`add_to_main_grad`.
        """
        main_grad = self.main_grad
        if in_gemm and main_grad.dtype == grad_TO.dtype == input_TI.dtype:
            main_grad.addmm_(grad_TO.t(), input_TI)
        elif in_gemm and _adds_to_fp32(main_grad, grad_TO, input_TI):
            torch.addmm(main_grad, grad_TO.t(), input_TI, out_dtype=main_grad.dtype, out=main_grad)
        else:
            self.add_to_main_grad(grad_TO.t().matmul(input_TI), sum_first)

    def put(self) -> None:
        """Notes that a dW of this weight was put into the store."""
        self.num_pending += 1

    def ran(self) -> None:
        """Notes that a dW has run, or was enqueued on the current stream."""
        self.num_pending -= 1
        if self.ddp_stream is not None:
            self.dw_stream = torch.cuda.current_stream()

    def add_sum(self) -> None:
        """Adds the sum that :meth:`add_to_main_grad` has kept, if any. Call on the stream of the dWs."""
        if self._sum is not None:
            self.main_grad.add_(self._sum)
            self._sum = None

    def report(self) -> None:
        """Reports to DDP that the gradient of this micro-batch is complete. DDP then reads ``.grad`` and clears it."""
        assert self.num_pending == 0, f"{self.name} was reported with {self.num_pending} dW pending"
        parameter = self.parameter
        # If autograd computed a gradient as well (for a use that was not deferred), DDP adds it. Otherwise DDP still
        # insists on a .grad: an expanded scalar takes no memory, and the flag keeps it from being added.
        parameter.grad_added_to_main_grad = parameter.grad is None  # type: ignore[attr-defined]
        if parameter.grad is None:
            parameter.grad = self._placeholder
        elif self.ddp_stream is not None:  # DDP frees it there, and the backward allocated it elsewhere
            parameter.grad.record_stream(self.ddp_stream)
        self._report_ready()
        self.num_reported += 1

    @cached_property
    def _placeholder(self) -> torch.Tensor:
        parameter = self.parameter
        # Not new_empty: of a weight that is kept in fp8 that would be a quantized tensor.
        return torch.empty(1, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)

    def abandon(self) -> None:
        """Forgets dWs of a backward pass that has failed. Its part of the gradient is incomplete."""
        self.num_pending = 0
        self._sum = None


def _adds_to_fp32(main_grad: torch.Tensor, grad: torch.Tensor, input: torch.Tensor) -> bool:
    """Whether the device has a GEMM for these types; bf16 and fp16 are those that torch's kernel takes."""
    is_half = grad.dtype == input.dtype and grad.dtype in (torch.bfloat16, torch.float16)
    return is_half and main_grad.dtype is torch.float32 and _has_gemm_into_fp32(main_grad.device.type)


@cache
def _has_gemm_into_fp32(device_type: str) -> bool:
    """Whether this build of torch has the kernel for devices of this type; in torch 2.11 to 2.15 only CUDA's have it.

    Before 2.11, which is the oldest supported version, the kernel refuses a gradient of another type than the product's
    factors.
    """
    operator = "aten::addmm.dtype_out"
    if not torch._C._dispatch_has_kernel(operator):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, torch._C._dispatch_key_for_device(device_type))


@dataclass(frozen=True)
class _Task:
    """One deferred GEMM and the weights whose dWs it computes."""

    weights: tuple[DeferredWeight, ...]
    compute: Callable[[], None]
    num_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(weight.name for weight in self.weights)


class WeightGradStore:
    """Holds the deferred dWs of a rank and the parameters that are still to be reported.

    All dWs have run and have been reported by the end of the backward pass. Where memory is bounded, a dW may have to
    run earlier. That moves no report, so ranks with different amounts of pinned memory agree about the order of
    collectives.

    Attributes:
        trace: trace of the current step, None while nothing is recorded.
        part: the part of a chunk's rows whose forward, or its repetition in the backward pass, is under way; None
            outside of parts.
        put_captured: takes a dW in place of :meth:`put` while a graph is captured; None otherwise.
    """

    put_captured: Callable[[Sequence[DeferredWeight], Callable[[], None]], None] | None = None

    def __init__(self, rules: DwRules, stats: CommStats, rules_at_ends: DwRules | None = None) -> None:
        """
        Args:
            rules: rules for the time at which dWs run; a window of 0 defers nothing.
            rules_at_ends: rules for micro-batches at the ends of a step with pairing; None for the same.
        """
        self.trace: Recorder | None = None
        self.part: PartOfRows | None = None
        self._stats = stats
        self._rules = rules
        self._rules_in_middle, self._rules_at_ends = rules, rules_at_ends or rules
        self._queue: DwQueue[_Task, DeferredWeight] = DwQueue(rules)
        self._weights: set[DeferredWeight] = set()
        self._flush_is_queued = False

    @classmethod
    def of(cls, plan: Plan, stats: CommStats) -> "WeightGradStore":
        """Returns a store that runs dWs as ``plan`` says."""
        return cls(DwRules.of(plan.in_middle), stats, DwRules.of(plan.at_ends))

    def configure(self, plan: Plan) -> None:
        """Runs dWs as ``plan`` says from the next backward pass on; see :meth:`begin_backward`."""
        self._rules_in_middle, self._rules_at_ends = DwRules.of(plan.in_middle), DwRules.of(plan.at_ends)
        self.begin_backward(at_end=False)

    def begin_backward(self, at_end: bool) -> None:
        """Runs dWs by the rules for the micro-batch whose backward pass comes next.

        Args:
            at_end: whether it is one at an end of a step with pairing.

        Raises:
            AssertionError: a dW or a report of the last backward pass is pending.
        """
        self.assert_idle()
        self._rules = self._rules_at_ends if at_end else self._rules_in_middle
        self._queue = DwQueue(self._rules)

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, weights: Sequence[DeferredWeight], compute: Callable[[], None], num_bytes: int) -> None:
        """Defers a dW, after running older ones if memory is short. Called from a backward function.

        Args:
            weights: weights whose dWs the same GEMM computes, one or several.
            compute: runs the GEMM and adds the result to the gradient.
            num_bytes: bytes that stay alive until the dW has run. A dW larger than the bound runs at once, after all
                others.
        """
        if self.put_captured is not None:
            return self.put_captured(weights, compute)
        for weight in weights:
            weight.put()
        self._weights.update(weights)
        must_run = self._queue.put(_Task(tuple(weights), compute, num_bytes), num_bytes)
        if self._rules.defers:
            self._flush_at_end_of_backward()
        if must_run:
            if self._rules.defers:
                self._stats.add("num_dw_early", len(must_run))
            self._run_all(must_run)

    def mark_last_use(self, weight: DeferredWeight) -> None:
        """Announces that all dWs of ``weight`` in this backward pass have been put."""
        if self._rules.defers:
            self._flush_at_end_of_backward()
        _report_all(self._queue.mark_last_use(weight))

    def fill(self, in_flight: Callable[[], bool], op: Op) -> None:
        """Runs dWs while ``in_flight()`` holds: those planned for ``op`` first, then the oldest."""
        self._begin_gap(op)
        while len(self._queue) and in_flight():
            task = self._queue.take_next()
            assert task is not None
            self._run_in_gap(task)

    def run_planned(self, op: Op) -> None:
        """Runs the dWs planned for ``op``, a message of the forward paired with the backward."""
        self._begin_gap(op)
        while (task := self._queue.take_planned()) is not None:
            self._run_in_gap(task)

    def run_ahead(self, op: Op) -> None:
        """Runs dWs in front of the wait for ``op`` if the host can't see its end; see :meth:`DwQueue.take_ahead`."""
        self._begin_gap(op)
        while (task := self._queue.take_ahead()) is not None:
            self._run_in_gap(task)

    def _begin_gap(self, op: Op) -> None:
        if self._rules.gaps:  # only these need the op's name, which the host would make for every wait
            self._queue.begin_gap(str(op))

    def advance_window(self) -> None:
        """Runs and reports what is due after one more backward all-to-all has finished."""
        self._run_late(self._queue.advance_window())
        _report_all(self._queue.take_reports())

    def flush(self) -> None:
        """Runs and reports everything at the end of the backward pass."""
        self._run_late(self._queue.flush())
        weights = self._queue.flush_reports()
        _report_all(weights)
        for stream in {one.ddp_stream for one in weights if one.ddp_stream is not None}:  # autograd joined it too early
            torch.cuda.current_stream().wait_stream(stream)
        self._stats.raise_to("peak_dw_bytes", self._queue.peak_bytes)
        self._queue = DwQueue(self._rules)
        self._flush_is_queued = False  # last, so that a flush that raised is seen

    def abandon(self) -> None:
        """Drops the pending dWs and reports of a failed backward pass. The next step must clear the gradients."""
        for weight in self._weights:
            weight.abandon()
        self._queue = DwQueue(self._rules)
        self._flush_is_queued = False

    def assert_idle(self) -> None:
        """Checks between backward passes that every dW has run and has been reported.

        Raises:
            AssertionError: a dW or a report is pending; the message names it. The gradients of this step are wrong.
        """
        pending = [weight.name for task in self._queue.pending for weight in task.weights]
        unreported = [weight.name for weight in self._queue.unreported]
        is_idle = not pending and not unreported and not self._flush_is_queued
        assert is_idle, (
            f"a backward pass ended without its flush: {len(pending)} dW pending {pending[:3]}, {len(unreported)} "
            f"weights not reported {unreported[:3]}"
        )

    def expect_inner_backward(self) -> None:
        """Called from a backward function before it runs a backward of its own, which ends before the pass does."""
        if self._rules.defers:
            self._flush_at_end_of_backward()

    def _flush_at_end_of_backward(self) -> None:
        if not self._flush_is_queued:
            self._flush_is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)

    def _run_in_gap(self, task: _Task) -> None:
        self._stats.add("num_dw_in_gaps", 1)
        self._run(task)

    def _run_late(self, tasks: list[_Task]) -> None:
        if tasks:
            self._stats.add("num_dw_late", len(tasks))
            self._run_all(tasks)

    def _run_all(self, tasks: list[_Task]) -> None:
        while tasks:
            self._run(tasks.pop(0))  # the list would keep the dW's tensors alive

    def _run(self, task: _Task) -> None:
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            if self.trace is None:
                task.compute()
            else:
                weight_bytes = sum(weight.num_bytes for weight in task.weights)
                with self.trace.weight_grad(task.names[0], task.num_bytes, weight_bytes):
                    task.compute()
        for weight in task.weights:
            weight.ran()


def _report_all(weights: Sequence[DeferredWeight]) -> None:
    """Reports weights to DDP in order. Neighbors on the same streams share one wait for their dWs."""
    for (ddp_stream, dw_stream), sharing in groupby(weights, key=attrgetter("ddp_stream", "dw_stream")):
        together = list(sharing)
        with nullcontext() if dw_stream is None else torch.cuda.stream(dw_stream):
            for weight in together:
                weight.add_sum()
        if dw_stream is not None:
            ddp_stream.wait_stream(dw_stream)
        with nullcontext() if ddp_stream is None else torch.cuda.stream(ddp_stream):
            for weight in together:
                weight.report()
