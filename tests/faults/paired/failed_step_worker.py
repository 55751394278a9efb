"""Paired steps that fail in the same place on both ranks, each followed by a step as if nothing had happened."""

import gc
import weakref
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from tests.faults.paired.step import PLANS, PairedStep

NUM_PLACES = 24
"""Places that are tried, evenly spread over those of a step."""


class Activations:
    """Counts what the graphs of micro-batches keep for their backward, in forwards on a step's lane.

    Attributes:
        most_alive: the largest number of tensors so far.
    """

    def __init__(self, step: PairedStep) -> None:
        self.most_alive = 0
        self._alive: weakref.WeakSet[_Kept] = weakref.WeakSet()
        step.comm.progress.lane.on_thread = lambda: saved_tensors_hooks(self._keep, lambda kept: kept.tensor)

    def _keep(self, tensor: torch.Tensor) -> "_Kept":
        kept = _Kept(tensor.detach())
        self._alive.add(kept)
        self.most_alive = max(self.most_alive, len(self._alive))
        return kept

    @property
    def num_alive(self) -> int:
        """Number of tensors that a graph keeps."""
        return len(self._alive)


class _Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def what_is_left(step: PairedStep) -> list[str]:
    """What a failed step has left in the objects that the next one uses."""
    pairing, store = step.comm.progress, step.comm.store
    left = []
    if pairing.is_on or not pairing.lane.is_idle:
        left.append("a forward on the lane")
    if (pairing._forwards.number, pairing._backwards.number) != (None, None):
        left.append("the number of a micro-batch")
    if len(store):
        left.append("deferred dWs")
    store.assert_idle()
    return left


def fail_at(step: PairedStep, place: str) -> str:
    """Runs a step that fails at ``place``; returns the message of its error, empty if it did not fail."""
    step.boundaries.begin_step("exception", place)
    try:
        step.run(traced=False)
    except RuntimeError as error:
        return str(error)
    return ""


def attempts(plan: str, stack: ExitStack) -> dict[str, object]:
    """Steps that fail here and there, and whether the steps between them equal an undisturbed run's."""
    # Megatron's DDP can't begin a step while it reduces gradients of another one, so it reduces them at the end.
    step = PairedStep(PLANS[plan], 120.0, stack, overlap_grad_reduce=False)
    activations = Activations(step)
    expected = step.run(traced=False), step.gradients()
    # Ranks run dWs, and report weights behind them, at times of their own: failing there they would have sent different
    # messages, and the next step's would not fit together.
    labels = [label for label in step.boundaries.passed if not label.startswith(("dW", "report"))]
    threads = {step.comm.progress.lane._thread}
    places = labels[:: max(1, len(labels) // NUM_PLACES)]
    alive_at_begin = activations.num_alive
    errors, left, alive, unequal = [], [], [], []
    for place in places:
        step.boundaries.begin_step()
        errors.append(fail_at(step, place))
        dist.barrier()
        left += [f"{place}: {what}" for what in what_is_left(step)]
        step.boundaries.begin_step()
        losses, gradients = step.run(traced=False), step.gradients()
        if losses != expected[0] or any(not gradients[name].equal(expected[1][name]) for name in gradients):
            unequal.append(place)
        threads.add(step.comm.progress.lane._thread)
        gc.collect()
        alive.append(activations.num_alive)
    return {
        "places": places,
        "errors": errors,
        "left": left,
        "alive_at_begin": alive_at_begin,
        "alive": alive,
        "most_alive": activations.most_alive,
        "unequal": unequal,
        "num_threads": len(threads),
    }


def all_attempts() -> dict[str, Any]:
    """By plan, see :func:`attempts`."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, create_gloo_process_groups=False)
    results = {}
    for plan in PLANS:
        with ExitStack() as stack:
            results[plan] = attempts(plan, stack)
    return results
