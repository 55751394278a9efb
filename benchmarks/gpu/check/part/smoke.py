"""Each path of the code once, with a small model: that it runs, and how often the host waits for the device.

The first step of a path warms up: it makes communicators and memory. The second one is counted, timed and saved.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.check.part import tuner
from benchmarks.gpu.check.part.models import FULL_RECOMPUTE, NUM_RANKS, mocked_ranks, small_work
from benchmarks.gpu.check.part.waits import HostWaits, counted_waits, expected_waits, sync_debug_mode_of
from benchmarks.gpu.check.place import Place
from benchmarks.gpu.measure import elapsed_ms
from benchmarks.gpu.record import Recorder
from benchmarks.gpu.variants import MEGATRON_OVERLAP, PLANS, Runner, Variant, Work, why_megatron_refuses
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.runtime.trace import Trace
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import (
    ChunkDim,
    DwPolicy,
    OverlapRange,
    Plan,
    Segment,
    fixed_plan,
    paired,
)

_TWO, _EXPERTS = fixed_plan(2), fixed_plan(2, overlap_range=OverlapRange.EXPERTS)
_SEGMENTS = Plan((Segment(1, 1, 1), Segment(2, None, 2, ChunkDim.SEQUENCE)), dw_window=4)
_CAPACITY: Mapping[str, Any] = {"moe_expert_capacity_factor": 0.75}
_PADDED: Mapping[str, Any] = {**_CAPACITY, "moe_pad_expert_input_to_capacity": True}
_OVERLAPPED: Mapping[str, Any] = {"overlap_grad_reduce": True, "bucket_size": 40_000}
_LEAST_S = 2.0
"""Time for a path; with less left no other one is begun."""


@dataclass(frozen=True)
class Path:
    """What runs.

    Attributes:
        of_size: fields of the model's size that differ.
        switches: plans that the model then switches to, a counted step with each.
        is_traced: whether the counted step records a trace.
        bf16: precision, else fp32.
        reduces: whether gradients are reduced at the end of a step.
    """

    variant: Variant
    of_size: Mapping[str, Any] = field(default_factory=dict)
    switches: Sequence[Plan] = ()
    is_traced: bool = False
    bf16: bool = True
    reduces: bool = False


def _paths() -> dict[str, Path]:
    """All paths by name, in the order of their value."""
    # The first layer is dense in this one, so that both kinds of layers run in chunks.
    dense_first = {"moe_every": 2}
    selective = {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]}
    shared = {"moe_shared_expert_intermediate_size": 128}
    two_hop = Variant(fixed_plan(2, dispatch=TWO_HOP), nodes=Nodes(2, NUM_RANKS // 2))
    sequence = fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE)
    return {
        **{name: Path(Variant.named(name)) for name in PLANS},
        "stock fp32": Path(Variant(), bf16=False),
        "ours k=2 fp32": Path(Variant(_TWO), bf16=False),
        "recompute": Path(Variant(_TWO, FULL_RECOMPUTE)),
        "selective recompute": Path(Variant(_TWO, selective)),
        "weight gradients at once": Path(Variant(fixed_plan(2, DwPolicy.NONE))),
        "shared experts": Path(Variant(_TWO, shared)),
        "capacity": Path(Variant(_EXPERTS, _CAPACITY)),
        "capacity, padded": Path(Variant(_EXPERTS, _PADDED)),
        "capacity, padded, k=1": Path(Variant(fixed_plan(1, overlap_range=OverlapRange.EXPERTS), _PADDED)),
        "segments": Path(Variant(_SEGMENTS)),
        "chunks over gate": Path(Variant(fixed_plan(2, overlap_range=OverlapRange.GATE))),
        "dense first layer": Path(Variant(_TWO), dense_first),
        "latent attention, sequence": Path(Variant(sequence), {"latent": True}),
        "tiles k=2": Path(Variant(fixed_plan(2, tiles=2))),
        "two hops": Path(two_hop),
        "switched plans": Path(
            Variant(fixed_plan(1), plans_switch=True), switches=(_TWO, paired(fixed_plan(1)), sequence)
        ),
        "overlapped reductions": Path(Variant(_TWO, ddp=_OVERLAPPED), reduces=True),
        "overlapped reductions in pairs": Path(Variant(paired(fixed_plan(1)), ddp=_OVERLAPPED), reduces=True),
        "distributed optimizer": Path(
            Variant(_TWO, ddp={**_OVERLAPPED, "use_distributed_optimizer": True}), reduces=True
        ),
        "traced": Path(Variant(_TWO), is_traced=True),
        "traced pairs": Path(Variant(paired(fixed_plan(1))), is_traced=True),
    }


def run(record: Recorder, place: Place, names: Sequence[str] | None = None) -> None:
    """Runs all paths.

    Args:
        names: the paths to run, and of the parts of the tuner; None for all.
    """
    paths = _paths()
    jobs: dict[str, Callable[[], None]] = {name: partial(_run_path, record, place, name, paths[name]) for name in paths}
    jobs |= {name: partial(job, record, place, name) for name, job in tuner.JOBS.items()}
    chosen = list(jobs) if names is None else list(names)
    with mocked_ranks(), _debug_mode(place):
        while chosen and record.time_left_s() > _LEAST_S:
            name = chosen.pop(0)
            with record.guarded(name):
                jobs[name]()
    if chosen:
        record.add("left out", why="the time of this part is over", names=chosen)


def _debug_mode(place: Place) -> AbstractContextManager[None]:
    return nullcontext() if place.gpu is None else sync_debug_mode_of(place.gpu)


def _run_path(record: Recorder, place: Place, name: str, path: Path) -> None:
    work = replace(small_work(place, **path.of_size), bf16=path.bf16)
    if why := _why_left_out(name, place, work):
        record.add(name, left_out=why)
        return
    runner = Runner(path.variant, work)
    _step(runner, path)
    _count(record, place, name, runner, path, path.variant.plan)
    for plan in path.switches:
        assert runner.setup is not None
        runner.setup.switch(plan)
        _count(record, place, f"{name}: {plan}", runner, path, plan)


def _why_left_out(name: str, place: Place, work: Work) -> str | None:
    if name != MEGATRON_OVERLAP:
        return None
    if place.is_rehearsal:
        return "it resizes the memory of tensors, which the virtual GPU can't"
    return why_megatron_refuses(work)


def _step(runner: Runner, path: Path) -> list[torch.Tensor]:
    runner.reset_gradients()
    losses = runner.step()
    if path.reduces:
        runner.finish_reductions()
    return losses


def _count(record: Recorder, place: Place, name: str, runner: Runner, path: Path, plan: Plan | None) -> None:
    """Runs the counted step, and saves what it has shown."""
    waits, losses = HostWaits(), list[torch.Tensor]()
    trace = None
    if path.is_traced:
        assert runner.comm is not None
        trace = Trace(place.device, 0)
        runner.comm.record_to(trace)

    def counted() -> None:
        nonlocal waits
        with counted_waits() as waits:
            losses.extend(_step(runner, path))

    runner.take_times()
    torch.cuda.reset_peak_memory_stats(place.device)
    with place.watch():
        if trace is not None:
            trace.begin_step()
        step_ms = elapsed_ms(counted, place.device)
        num_spans = 0 if trace is None else len(trace.end_step().timeline.spans)
    if trace is not None and runner.comm is not None:
        runner.comm.record_to(None)
    times = runner.take_times()
    num_layers = sum(runner.has_experts)
    num_chunks = 1 if plan is None else plan.num_chunks
    expected = None if plan is None else _expected(runner, plan)
    values = {
        "ok": True,
        "ms": round(step_ms, 3),
        "peak_mb": round(torch.cuda.max_memory_allocated(place.device) / 1e6, 1),
        "waits": waits.number,
        "waits_expected": expected,
        "waits_per_layer_and_chunk": round(waits.number / runner.num_micro_batches / num_layers / num_chunks, 3),
        "waits_on_backward_thread": waits.num_in_backward,
        "sites": waits.most_frequent(),
        "loss": [round(loss.item(), 5) for loss in losses],
        "num_all_to_alls": times.num_all_to_alls,
        **({"num_spans": num_spans} if path.is_traced else {}),
    }
    problems = _problems(waits, expected, plan, losses)
    if path.is_traced and not num_spans:
        problems.append("the trace is empty")
    if problems:
        record.fail(name, "; ".join(problems), **{**values, "ok": False})
    else:
        record.add(name, **values)


def _expected(runner: Runner, plan: Plan) -> int:
    config = runner.config
    return expected_waits(
        plan,
        runner.has_experts,
        runner.num_micro_batches,
        config.moe_expert_capacity_factor is not None,
        config.moe_pad_expert_input_to_capacity,
    )


def _problems(waits: HostWaits, expected: int | None, plan: Plan | None, losses: Sequence[torch.Tensor]) -> list[str]:
    found = []
    if expected is not None and waits.number != expected:
        found.append(f"expected the host to wait {expected} times, found {waits.number}: {waits.most_frequent()}")
    # In pairs the backward launches messages of the forward paired with it, whose sizes may be on their way.
    if plan is not None and not plan.is_paired and waits.num_in_backward:
        found.append(f"the host waited {waits.num_in_backward} times in the backward")
    if not all(loss.isfinite().all() for loss in losses):
        found.append("a loss is not finite")
    return found
