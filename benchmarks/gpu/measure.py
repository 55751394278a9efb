"""Lets the variants take turns, compares their gradients, and measures time, exposed communication and memory."""

import gc
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.table import Samples
from benchmarks.gpu.trace import Communication, communication_of
from benchmarks.gpu.variants import MEGATRON_OVERLAP, STOCK, Runner, Variant, Work, why_megatron_refuses
from benchmarks.gradient_error import relative_errors

MAX_ERROR_RATIO = 2.0
MAX_EXTRA_ERROR = 0.02
"""A gradient may be this many times as far from fp32's as stock's own bf16 gradient is, and a little more.

Both are relative to the norm. bf16 rounds by up to 4e-3, errors grow from layer to layer, and a token on the edge
between two experts goes to the other one: stock's own error is 0.15 for some experts of a GPT2-S. Chunks change the
order of sums and so draw other errors of the same size. A lost chunk or weight gradient is an error of 0.5 or more.
"""
_NUM_PROFILED = 3


class WrongGradientsError(RuntimeError):
    """A variant computes something else than stock: its times would mean nothing."""


def measure(
    work: Work, names: Sequence[str], num_rounds: int, num_warmup: int
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Samples of each variant, stock first; and why others could not run.

    Args:
        names: of the variants; stock is always measured.

    Raises:
        WrongGradientsError: a variant's gradients are further from fp32's than bf16 explains.
    """
    runners, skipped = _start(work, names)
    samples = {name: Samples() for name in runners}
    for _ in range(num_warmup):
        for runner in runners.values():
            _step_ms(runner, work.device)
            runner.take_times()
    _compare_gradients(work, runners, samples)
    gc.collect()  # hooks tie a model into cycles, and the fp32 one is large
    dice = random.Random(0)  # noqa: S311
    for _ in range(num_rounds):
        for name in dice.sample(list(runners), len(runners)):
            _add_round(samples[name], runners[name], work.device)
    if work.device.type == "cuda":
        _profile(runners, samples, work.device)
    return samples, skipped


def _start(work: Work, names: Sequence[str]) -> tuple[dict[str, Runner], dict[str, str]]:
    """Models of all variants; Megatron's own overlap is left out where Megatron refuses to set it up.

    Its requirements change with Megatron's version. Errors of any other kind end the benchmark.
    """
    runners, skipped = {}, {}
    for name in [STOCK, *(name for name in names if name != STOCK)]:
        if name != MEGATRON_OVERLAP:
            runners[name] = Runner(Variant.named(name), work)
        elif work.num_micro_batches < 2:
            skipped[name] = "it overlaps two micro-batches, and a step has one"
        elif refusal := why_megatron_refuses(work):
            skipped[name] = refusal
        else:
            runners[name] = Runner(Variant.named(name), work)
    return runners, skipped


def _compare_gradients(work: Work, runners: Mapping[str, Runner], samples: Mapping[str, Samples]) -> None:
    """Gradients of the last warm-up step against those of stock in fp32, on the same weights and data."""
    exact = Runner(Variant.named(STOCK), replace(work, bf16=False))
    exact.copy_weights(runners[STOCK])
    _step_ms(exact, work.device)
    truth = exact.gradients()
    stock = relative_errors(runners[STOCK].gradients(), truth)
    for name, runner in runners.items():
        check_errors(name, relative_errors(runner.gradients(), truth), stock)
        samples[name].gradient_error = whole_error(runner.gradients(), truth)


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


def _add_round(samples: Samples, runner: Runner, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        before_bytes = torch.cuda.memory_allocated(device)
    samples.step_ms.append(_step_ms(runner, device))
    times = runner.take_times()
    if on_gpu:
        samples.peak_mb.append((torch.cuda.max_memory_allocated(device) - before_bytes) / 1e6)
    else:
        samples.exposed_ms.append(times.exposed_ms + times.counts_exposed_ms)


def _step_ms(runner: Runner, device: torch.device) -> float:
    """Time of a step; that of clearing the gradients is not in it."""
    runner.reset_gradients()
    return elapsed_ms(runner.step, device)


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


def _profile(runners: Mapping[str, Runner], samples: Mapping[str, Samples], device: torch.device) -> None:
    _traced(runners[STOCK], device)  # the first use sets the profiler up
    for _ in range(_NUM_PROFILED):
        for name, runner in runners.items():
            seen = _traced(runner, device)
            samples[name].exposed_ms.append(seen.exposed_ms)
            samples[name].wire_ms.append(seen.wire_ms)


def _traced(runner: Runner, device: torch.device) -> Communication:
    """Communication of one step, from the profiler's trace."""
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
