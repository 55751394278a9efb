"""Pieces of the tuner on a device's clock: a profile of the model, the links, and the memory that is left."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch

from benchmarks.gpu.check.part.models import small_work
from benchmarks.gpu.check.place import Place
from benchmarks.gpu.record import Recorder
from benchmarks.gpu.variants import Runner, Variant
from megatron_lancet.features.tuning.memory_bound import memory_bound_bytes
from megatron_lancet.patching import replaced
from megatron_lancet.planning.profile import Profile
from megatron_lancet.profiler import links, slowdown
from megatron_lancet.profiler.facts import ProfiledModel
from megatron_lancet.profiler.measure import ProfileRun
from megatron_lancet.schedule.plan import Plan, fixed_plan
from megatron_lancet.training.plan.memory_budget import least_room_bytes

_PLANS = (fixed_plan(1), fixed_plan(2))
_VIRTUAL_MEMORY_BYTES = 1 << 33


def measure_profile(record: Recorder, place: Place, name: str) -> None:
    """Profiles a model under two plans, with its links, and asks for the memory that a plan may use."""
    work = small_work(place)
    runner = Runner(Variant(_PLANS[0], plans_switch=True), work)
    assert runner.setup is not None
    size = work.size
    model = ProfiledModel(runner.setup.stages, place.device, size.micro_batch, size.seq_length, work.num_micro_batches)
    with _quick(place) if place.is_rehearsal else nullcontext():
        profile_run = ProfileRun(model, _PLANS, num_traced_steps=1)
        runner.reset_gradients()
        runner.step()
        present: Plan = _PLANS[0]
        for index, plan in enumerate(profile_run.plans):
            if plan != present:
                runner.setup.switch(plan)
                present = plan
            runner.reset_gradients()
            with place.watch(), profile_run.step(index):
                runner.step()
            runner.take_times()
        profile = profile_run.finish()
        room_bytes = least_room_bytes(place.device)
    _save(record, name, profile, room_bytes)


def _save(record: Recorder, name: str, profile: Profile, room_bytes: int) -> None:
    link = profile.link
    bound_bytes = memory_bound_bytes(profile, _PLANS, room_bytes)
    values = {
        "ok": True,
        "num_ops": len(profile.ops),
        "num_weight_grads": len(profile.weight_grads),
        "steps_ms": dict(profile.measured_steps_ms),
        "rest_ms": profile.rest_ms,
        "all_to_all": [list(point) for point in link.all_to_all],
        "queued": [list(point) for point in link.queued],
        "counts_ms": link.counts_ms,
        "all_reduce": [list(point) for point in link.all_reduce],
        "compute_slowdown": link.compute_slowdown,
        "memory_slowdown": link.memory_slowdown,
        "room_mb": round(room_bytes / 1e6),
        "bound_mb": None if bound_bytes is None else round(bound_bytes / 1e6),
    }
    if problems := profile_problems(profile, bound_bytes):
        record.fail(name, "; ".join(problems), **{**values, "ok": False})
    else:
        record.add(name, **values)


def profile_problems(profile: Profile, bound_bytes: int | None) -> list[str]:
    """What can't be true in a profile."""
    found = [f"the step under {plan} took {ms} ms" for plan, ms in profile.measured_steps_ms.items() if not ms > 0]
    times = [ms for _, ms in (*profile.link.all_to_all, *profile.link.all_reduce)]
    if not times or not all(0 <= ms < math.inf for ms in times):
        found.append(f"the times of messages are {times}")
    if not profile.ops:
        found.append("no op was measured")
    if bound_bytes is not None and bound_bytes <= 0:
        found.append("plans may use no memory")
    return found


@contextmanager
def _quick(place: Place) -> Iterator[None]:
    """In a rehearsal: fewer messages and kernels, and the figures of memory that the virtual GPU lacks."""
    with (
        replaced(links, "_BUDGET_S", 0.0),
        replaced(links, "_REDUCE_BUDGET_S", 0.0),
        replaced(links, "_REDUCED_BYTES", links._REDUCED_BYTES[:1]),
        replaced(slowdown, "_MAX_KERNELS", 4),
        replaced(torch.cuda, "mem_get_info", lambda device: (_VIRTUAL_MEMORY_BYTES, _VIRTUAL_MEMORY_BYTES)),
    ):
        yield


JOBS: Mapping[str, Callable[[Recorder, Place, str], None]] = {"profile, links and memory": measure_profile}
"""By name."""
