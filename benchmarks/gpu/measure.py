"""Lets the variants take turns, compares their gradients, and measures time, exposed communication and memory.

Each result is saved when it is there, in records of these kinds:

=============  ==========================================================================================
name           values
=============  ==========================================================================================
``variant``    ``variant``, and ``skipped`` with the reason, or ``error``
``gradients``  ``variant``, ``relative_error`` of all gradients against fp32, or ``error``
``step``       ``variant``, ``link``, ``round``, ``step_ms``, ``peak_mb`` or (on a CPU) ``exposed_ms``
``trace``      ``variant``, ``link``, ``wire_ms``, ``exposed_ms``, ``idle_ms``
``stopped``    ``rounds`` that were measured, of ``wanted``, when the time was up
=============  ==========================================================================================
"""

import gc
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.record import Recorder
from benchmarks.gpu.trace import Communication, communication_of
from benchmarks.gpu.variants import MEGATRON_OVERLAP, STOCK, Runner, Variant, Work, why_megatron_refuses
from benchmarks.gradient_error import relative_errors
from megatron_lancet.testkit.mock.link import Link

MAX_ERROR_RATIO = 2.0
MAX_EXTRA_ERROR = 0.02
"""A gradient may be this many times as far from fp32's as stock's own bf16 gradient is, and a little more.

Both are relative to the norm. bf16 rounds by up to 4e-3, errors grow from layer to layer, and a token on the edge
between two experts goes to the other one: stock's own error is 0.15 for some experts of a GPT2-S. Chunks change the
order of sums and so draw other errors of the same size. A lost chunk or weight gradient is an error of 0.5 or more.
"""
FREE = Link()


class WrongGradientsError(RuntimeError):
    """A variant computes something else than stock: its times would mean nothing."""


@dataclass(frozen=True)
class Turns:
    """How often each variant is measured.

    Attributes:
        links: links of the messages; all variants run on each.
        rounds: timed steps of each variant on each link.
        warmup: untimed steps before.
        traced: steps under the profiler, after the timed ones.
        reserve_s: no round begins when less time is left, in seconds; for the traced steps.
        has_ideal: whether stock also runs on a link that takes no time.
        compared_samples: samples of each micro-batch whose gradients are compared; None for all. In fp32 attention
            keeps its scores.
    """

    links: Sequence[Link]
    rounds: int
    warmup: int
    traced: int = 3
    reserve_s: float = 0.0
    has_ideal: bool = False
    compared_samples: int | None = None


class Measurement:
    """The variants of one work, measured in turns in one mocked world."""

    def __init__(
        self,
        work: Work,
        record: Recorder,
        using_link: Callable[[Link], AbstractContextManager[None]],
        watch: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        Args:
            using_link: context in which the world's messages take the time of a link.
            watch: context of each step.
        """
        self._work = work
        self._record = record
        self._using_link = using_link
        self._watch = watch
        self._runners: dict[str, Runner] = {}
        self._dice = random.Random(0)  # noqa: S311

    def run(self, names: Sequence[str], turns: Turns) -> None:
        """Measures stock and the variants; one that fails is left out from there on.

        Raises:
            RuntimeError: stock itself fails.
        """
        self._start(names)
        with self._using_link(FREE):
            for _ in range(turns.warmup):
                for name, runner in list(self._runners.items()):
                    with self._kept_if_it_works("variant", name):
                        self._step_ms(runner)
                        runner.take_times()
            self._compare_gradients(turns.compared_samples)
        gc.collect()  # hooks tie a model into cycles, and the fp32 one is large
        self._time(turns)
        if self._work.device.type == "cuda":
            self._trace(turns)

    def _start(self, names: Sequence[str]) -> None:
        """Models of all variants; Megatron's own overlap is left out where Megatron refuses to set it up.

        Its requirements change with Megatron's version.
        """
        for name in [STOCK, *(name for name in names if name != STOCK)]:
            if name == MEGATRON_OVERLAP and self._work.num_micro_batches < 2:
                reason: str | None = "it overlaps two micro-batches, and a step has one"
            else:
                reason = why_megatron_refuses(self._work) if name == MEGATRON_OVERLAP else None
            if reason is not None:
                self._record.add("variant", variant=name, skipped=reason)
                continue
            with self._record.guarded("variant", variant=name):
                self._runners[name] = Runner(Variant.named(name), self._work)
        self._check_stock()

    def _compare_gradients(self, num_samples: int | None) -> None:
        """Gradients of a step against stock's in fp32, on the same weights and data."""
        exact = Runner(Variant.named(STOCK), replace(self._work, bf16=False))
        exact.copy_weights(self._runners[STOCK])
        self._step_ms(exact, num_samples)
        truth = exact.gradients()
        stock: dict[str, float] = {}
        for name, runner in list(self._runners.items()):
            with self._kept_if_it_works("gradients", name):
                self._step_ms(runner, num_samples)
                runner.take_times()
                stock = stock or relative_errors(runner.gradients(), truth)  # stock is the first one
                check_errors(name, relative_errors(runner.gradients(), truth), stock)
                self._record.add("gradients", variant=name, relative_error=whole_error(runner.gradients(), truth))

    def _time(self, turns: Turns) -> None:
        for at in range(turns.rounds):
            if self._record.time_left_s() < turns.reserve_s:
                self._record.add("stopped", rounds=at, wanted=turns.rounds)
                return
            for link in turns.links:
                for name in self._dice.sample(list(self._runners), len(self._runners)):
                    self._time_one(name, link, at)
            if turns.has_ideal:
                self._time_one(STOCK, FREE, at)

    def _time_one(self, name: str, link: Link, at: int) -> None:
        runner, device = self._runners[name], self._work.device
        on_gpu = device.type == "cuda"
        with self._kept_if_it_works("step", name), self._using_link(link):
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
                before_bytes = torch.cuda.memory_allocated(device)
            found = {"step_ms": self._step_ms(runner)}
            times = runner.take_times()
            if on_gpu:
                found["peak_mb"] = (torch.cuda.max_memory_allocated(device) - before_bytes) / 1e6
            else:
                found["exposed_ms"] = times.exposed_ms + times.counts_exposed_ms
            self._record.add("step", variant=name, link=str(link), round=at, **found)

    def _trace(self, turns: Turns) -> None:
        with self._using_link(turns.links[0]):
            self._traced(STOCK)  # the first use sets the profiler up
        for _ in range(turns.traced):
            for link in turns.links:
                for name in list(self._runners):
                    if self._record.time_left_s() <= 0:
                        return
                    with self._kept_if_it_works("trace", name), self._using_link(link):
                        self._record.add("trace", variant=name, link=str(link), **asdict(self._traced(name)))

    def _traced(self, name: str) -> Communication:
        """Communication of one step, from the profiler's trace."""
        runner, device = self._runners[name], self._work.device
        runner.reset_gradients()
        torch.cuda.synchronize(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            runner.step()
            torch.cuda.synchronize(device)
        runner.take_times()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return communication_of(json.loads(path.read_text()))

    def _step_ms(self, runner: Runner, num_samples: int | None = None) -> float:
        """Time of a step, without the time to clear the gradients."""
        runner.reset_gradients()
        with self._watch():
            return elapsed_ms(partial(runner.step, num_samples), self._work.device)

    @contextmanager
    def _kept_if_it_works(self, kind: str, name: str) -> Iterator[None]:
        """Inside the context an error of a variant is saved, and the variant is left out from there on.

        Raises:
            RuntimeError: the variant is stock.
        """
        num_errors = self._record.num_errors
        with self._record.guarded(kind, variant=name):
            yield
        if self._record.num_errors > num_errors:
            del self._runners[name]
            self._check_stock()

    def _check_stock(self) -> None:
        if STOCK not in self._runners:
            raise RuntimeError("stock itself has failed: there is nothing to compare with")


Gradients = Mapping[str, torch.Tensor]


def whole_error(gradients: Gradients, truth: Gradients) -> float:
    """Of all gradients together, relative to the norm of the true ones."""
    error = math.hypot(*((gradients[name] - true).norm().item() for name, true in truth.items()))
    return error / max(math.hypot(*(true.norm().item() for true in truth.values())), 1e-12)


def check_errors(variant: str, found: Mapping[str, float], stock: Mapping[str, float]) -> None:
    """
    Raises:
        WrongGradientsError: a parameter's error is too large for bf16, or infinite.
    """
    for name, error in found.items():
        bound = MAX_ERROR_RATIO * stock[name] + MAX_EXTRA_ERROR
        if not error <= bound < math.inf:
            raise WrongGradientsError(
                f"{variant}: the gradient of {name} is {error:.2g} of its norm away from fp32's; stock's bf16 gradient "
                f"is {stock[name]:.2g} away, and at most {bound:.2g} was expected. This is not the same computation."
            )


def elapsed_ms(work: Callable[[], object], device: torch.device) -> float:
    """Time of ``work``: on a GPU between two events of the current stream, else by the clock."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        work()
        return (time.perf_counter() - start_s) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
