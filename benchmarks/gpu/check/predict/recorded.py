"""The step of a variant on a virtual GPU without values: what it enqueues, and the time of a modelled GPU for it."""

import functools
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from benchmarks.gpu import variants
from benchmarks.gpu.intervals import length, uncovered
from benchmarks.gpu.variants import Runner, Variant, Work
from megatron_lancet.lab.modelled_step.recording import gpu_without_values
from megatron_lancet.patching import around, replaced
from megatron_lancet.planning.profile import ModelFacts
from megatron_lancet.profiler.facts import ProfiledModel, model_facts
from megatron_lancet.runtime.trace import WeightGradFacts
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.virtual_gpu.log import CollectiveBegins, CollectiveEnds, Entry
from megatron_lancet.testkit.virtual_gpu.meta import META, MetaGpu
from megatron_lancet.testkit.virtual_gpu.playback.device_model import DeviceModel
from megatron_lancet.testkit.virtual_gpu.playback.marks import MarkedMessage, MarkedTrace
from megatron_lancet.testkit.virtual_gpu.playback.player import play
from megatron_lancet.training.platform.cuda_connections import RECOMMENDED

LAUNCHES_US = (4.0, 8.0, 16.0)
"""Host time of a kernel, Python and autograd included."""
LAUNCH_US = 8.0
"""Of the figures that are compared with measured ones."""
MESSAGE_SMS = 16
"""Multiprocessors of a message: blocks of the kernel that stands for one."""


@dataclass(frozen=True)
class Step:
    """What a step of a variant enqueues.

    Attributes:
        messages: all-to-alls of a plan; empty without one.
        received_rows: rows that the experts receive in each micro-batch, by op.
        weight_grads: sizes of deferred weight gradients, by op.
        facts: of the model; None without a plan.
    """

    log: Sequence[Entry]
    messages: Sequence[MarkedMessage]
    received_rows: dict[str, tuple[int, ...]]
    weight_grads: dict[str, WeightGradFacts]
    facts: ModelFacts | None


class _Trace(MarkedTrace):
    """Marks in the log, and the sizes that a profile needs."""

    def begin_step(self) -> None:
        super().begin_step()
        self.received_rows: defaultdict[str, list[int]] = defaultdict(list)
        self.weight_grads: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)

    def received(self, name: str, num_rows: int) -> None:
        self.received_rows[name].append(num_rows)

    @contextmanager
    def weight_grad(self, name: str, pinned_bytes: int, weight_bytes: int) -> Iterator[None]:
        self.weight_grads[name].append((pinned_bytes, weight_bytes))
        with super().weight_grad(name, pinned_bytes, weight_bytes):
            yield


def record(variant: Variant, work: Work) -> Step:
    """Records the second step of a variant, or the third with graphs. Enter it inside ``cpu_platform()``.

    Raises:
        NotImplementedError: the host needs a value that a model without values does not have.
    """
    size = work.size
    supply = functools.partial(_balanced_choice, size.experts_per_rank * work.num_ranks, size.top_k)
    # Megatron copies each model's scale into the first one of the process, and scales have no values here.
    no_scale = replaced(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    with no_scale, gpu_without_values(work.num_ranks, supply, expert_model_parallel_size=work.num_ranks) as gpu:
        with around(variants, "_build", _on_meta):
            runner = Runner(variant, replace(work, device=torch.device("cuda")))
        for _ in range(1 + variant.is_captured):  # the first one makes caches and copies that later ones find
            _run(gpu, runner)
        setup, facts = runner.setup, None
        trace = _Trace(gpu)
        if setup is not None:
            stages = tuple(setup.stages)
            facts = model_facts(
                ProfiledModel(stages, torch.device("cuda"), size.micro_batch, size.seq_length, work.num_micro_batches)
            )
            stages[0].decoder.comm.record_to(trace)
        _run(gpu, runner)
        return Step(
            tuple(gpu.log),
            tuple(trace.messages),
            {op: tuple(rows) for op, rows in trace.received_rows.items()},
            {
                op: WeightGradFacts(tuple(pinned for pinned, _ in sizes), sizes[0][1])
                for op, sizes in trace.weight_grads.items()
            },
            facts,
        )


def _run(gpu: MetaGpu, runner: Runner) -> None:
    runner.reset_gradients()
    with gpu.watch():
        runner.step()


def _on_meta(build: Any, *args: Any) -> Any:
    with torch.device(META):
        return build(*args)


def _balanced_choice(num_experts: int, topk: int, name: str, args: Sequence[Any]) -> torch.Tensor | None:
    """Supplies what Megatron's router scatters into an empty map of integers: the experts of each token."""
    target = args[0] if name == "scatter" else None
    if target is None or target.dim() != 2 or target.size(1) != num_experts or target.is_floating_point():
        return None
    return balanced_map(target.size(0), num_experts, topk).to(target.dtype)


@functools.cache
def balanced_map(num_tokens: int, num_experts: int, topk: int) -> torch.Tensor:
    """Experts of each token, [t, E] int32 of 0 and 1: each choice is equally likely, and no expert has more tokens.

    Experts are shuffled and dealt to as many tokens as they last for, again and again.
    """
    dice, order = random.Random(0), list(range(num_experts))  # noqa: S311 - the same everywhere
    chosen_tE = torch.zeros(num_tokens, num_experts, dtype=torch.int32)
    per_shuffle = num_experts // topk
    for token in range(num_tokens):
        place = token % per_shuffle
        if place == 0:
            dice.shuffle(order)
        chosen_tE[token, order[place * topk : (place + 1) * topk]] = 1
    return chosen_tE


def device_model(bytes_per_s: float, link: Link, launch_us: float = LAUNCH_US) -> DeviceModel:
    """The device of a prediction, with the link and the messages that the check mocks on a real one."""
    device = DeviceModel(
        bytes_per_s=bytes_per_s, connections=RECOMMENDED, link=link, one_link=True, message_sms=MESSAGE_SMS
    )
    return device.with_launch_us(launch_us)


def modelled(log: Sequence[Entry], bytes_per_s: float, link: Link) -> dict[str, Any]:
    """Figures of a step on a device.

    Args:
        link: a free one copies the data and takes no time besides.
    """
    if link == Link():
        log = [entry for entry in log if not isinstance(entry, CollectiveBegins | CollectiveEnds)]
    at = {launch_us: _figures(log, device_model(bytes_per_s, link, launch_us)) for launch_us in LAUNCHES_US}
    by_launch = {
        f"{launch_us:g}": {name: one[name] for name in ("step_ms", "exposed_ms", "host_bound_share")}
        for launch_us, one in at.items()
    }
    return {**at[LAUNCH_US], "by_launch_us": by_launch}


def _figures(log: Sequence[Entry], device: DeviceModel) -> dict[str, Any]:
    """Exposed is what a trace of a real step calls so: no kernel on any stream while a message is on the wire."""
    played = play(log, device)
    messages = [one.on_wire for one in played.messages]
    kernels = list(played.kernels.values())
    return {
        "step_ms": round(played.step_us / 1e3, 3),
        "exposed_ms": round(uncovered(messages, kernels) / 1e3, 3),
        "wire_ms": round(length(messages) / 1e3, 3),
        "kernels": len(played.kernels),
        "host_bound_share": round(played.for_launches_us / played.step_us, 4),
    }
