"""Host time of each op: what it costs to launch a layer, whatever the device needs to run it.

The figures are CPU time of the threads that launch: the main one, autograd's, and the lane of pairs. A trace of the
product marks the ends of ops in the backward; times of messages, reports and turns are taken out of the ops around
them. Waits of the host for the device are taken out of everything.
"""

import json
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check.part.cpu_time import CpuTimes, HostTrace, group_of, measured_calls
from benchmarks.gpu.check.part.models import mocked_ranks, small_work
from benchmarks.gpu.check.place import Place
from benchmarks.gpu.record import Recorder
from benchmarks.gpu.variants import PLANS, Runner, Variant, Work
from megatron_lancet.schedule.plan import ChunkDim, fixed_plan

VARIANTS = {
    "stock": Variant(),
    "one chunk": Variant(PLANS["ours k=1"]),
    "two sequence chunks": Variant(fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE)),
    "pairs": Variant(PLANS["pairs"]),
    "one chunk, graphs": Variant(PLANS["ours k=1"], is_captured=True),
    "two chunks, graphs": Variant(PLANS["ours k=2"], is_captured=True),
    "pairs, graphs": Variant(PLANS["pairs"], is_captured=True),
}
_NUM_LAYERS = 4
# With 16 experts a rank, as Qwen3-30B-A3B on eight, and kernels so small that the device is never behind.
_ON_DEVICE = {
    "num_layers": _NUM_LAYERS,
    "hidden": 256,
    "num_heads": 8,
    "num_key_heads": 2,
    "head_dim": 32,
    "expert_ffn": 128,
    "experts_per_rank": 16,
    "top_k": 8,
    "seq_length": 128,
}
_NUM_STEPS = 12
_NUM_WARM_UP = 3
_LEAST_S = 3.0


def run(record: Recorder, place: Place) -> None:
    """Measures all variants."""
    left_out = []
    work = small_work(place, **({} if place.is_rehearsal else _ON_DEVICE))
    with mocked_ranks():
        for name, variant in VARIANTS.items():
            if record.time_left_s() < _LEAST_S:
                left_out.append(name)
                continue
            with record.guarded(name):
                _measure(record, place, name, variant, work)
    if left_out:
        record.add("left out", why="the time of this part is over", names=left_out)


def _measure(record: Recorder, place: Place, name: str, variant: Variant, work: Work) -> None:
    runner = Runner(variant, work)
    for _ in range(2 if place.is_rehearsal else _NUM_WARM_UP):
        _step(runner)
    times = CpuTimes()
    num_steps = 1 if place.is_rehearsal else _NUM_STEPS
    with measured_calls(times), _marks(runner, times):
        for _ in range(num_steps):
            with place.watch():
                times.begin_step()
                _step(runner)
    runner.take_times()
    num_units = num_steps * work.num_micro_batches * work.size.num_layers
    groups_us: defaultdict[str, float] = defaultdict(float)
    for op, calls_us in sorted(times.of_layers.items()):
        us_per_layer = sum(calls_us) / num_units
        groups_us[group_of(op)] += us_per_layer
        record.add(
            f"{name}: {op}",
            us_per_call=round(statistics.median(calls_us), 2),
            calls_per_layer=round(len(calls_us) / num_units, 3),
            us_per_layer=round(us_per_layer, 2),
        )
    record.add(
        name,
        us_per_layer=round(sum(groups_us.values()), 1),
        groups_us={group: round(us, 1) for group, us in groups_us.items()},
        wait_us_per_layer=round(times.wait_us / num_units, 1),
        **_launched_per_layer(runner, variant, work, place),
        num_layers=work.size.num_layers,
    )


def _step(runner: Runner) -> None:
    runner.reset_gradients()
    runner.step()


@contextmanager
def _marks(runner: Runner, times: CpuTimes) -> Iterator[None]:
    """Marks the ends of ops inside the context: by the model's own trace, or by hooks of stock's layers."""
    trace = HostTrace(times)
    if runner.comm is not None:
        runner.comm.record_to(trace)
        try:
            yield
        finally:
            runner.comm.record_to(None)
        return
    hooks = []
    last = len(runner.layers) - 1
    for index, layer in enumerate(runner.layers):

        def before(_: Any, args: Any, inputs: dict[str, Any], index: int = index) -> tuple[Any, dict[str, Any]]:
            hidden = trace.boundary(inputs["hidden_states"], f"L{index + 1}.c0.I.layer")
            trace.skip()
            return args, {**inputs, "hidden_states": hidden}

        def after(_: Any, args: Any, output: Any, index: int = index) -> Any:
            trace.end(f"L{index + 1}.c0.F.layer")
            hidden, *others = output
            return (trace.begin_backward(hidden), *others) if index == last else output

        hooks += [layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _launched_per_layer(runner: Runner, variant: Variant, work: Work, place: Place) -> dict[str, float]:
    """Kernels and copies of a layer and a micro-batch: the difference to a model with half as many layers."""
    num_layers = work.size.num_layers
    fewer = Runner(variant, replace(work, size=replace(work.size, num_layers=num_layers // 2)))
    for _ in range(_NUM_WARM_UP):
        _step(fewer)
    more, less = (_launched(one, place) for one in (runner, fewer))
    num_units = (num_layers - num_layers // 2) * work.num_micro_batches
    return {f"{kind}_per_layer": round((more[kind] - less[kind]) / num_units, 2) for kind in ("kernels", "copies")}


def _launched(runner: Runner, place: Place) -> Counter[str]:
    """What a step puts on the device: kernels, and copies and fills."""
    runner.reset_gradients()
    torch.cuda.synchronize(place.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        runner.step()
        torch.cuda.synchronize(place.device)
    runner.take_times()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "copies"}
    return Counter(kinds[event["cat"]] for event in events if event.get("cat") in kinds)
