"""Losses and gradients of each plan against stock on the same weights and data, three times.

A race shows as a difference between two repeats: torch's deterministic algorithms run, as with Megatron's
``--deterministic-mode``, so repeats are equal to the bit. In fp32 each parameter's gradient is compared with
stock's; in bf16 with stock's in fp32, which stock's own bf16 gradient misses by as much.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.check.part.models import FULL_RECOMPUTE, copies, counted_row_sums, mocked_ranks, small_work
from benchmarks.gpu.check.place import Place
from benchmarks.gpu.measure import MAX_ERROR_RATIO, MAX_EXTRA_ERROR
from benchmarks.gpu.record import Recorder
from benchmarks.gpu.variants import PLANS, Runner, Variant, Work
from benchmarks.gradient_error import relative_difference, relative_errors, worst
from megatron_lancet.schedule.plan import ChunkDim, Plan, fixed_plan, paired

PRECISIONS = ("fp32", "bf16")
NUM_REPEATS = 3
FP32_BOUND = 1e-4
"""Of a gradient's norm. Chunks change the order of sums."""
BF16_LOSS_BOUND, FP32_LOSS_BOUND = 1e-2, 1e-5
"""Of a loss."""
BLIND_ABOVE = 0.4
"""A lost chunk of four is an error of 0.5 where tokens are alike: a larger bound might not see it."""
MOST_BLIND = 0.1
"""Share of the parameters whose bound may be wider: of a router, for which rounding moves tokens to other experts."""
REPEAT_BOUND = 1e-5
"""Of the difference between repeats in fp32, relative to the norm, where an operator is not deterministic."""
BF16_REPEAT_BOUND = 2e-2
_LEAST_S = 2.0
_WORKSPACE, _DETERMINISTIC_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
_NOT_DETERMINISTIC = "does not have a deterministic implementation"

type Gradients = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A model whose plans are compared.

    Attributes:
        of_size: fields of the size that differ.
        config: fields of Megatron's configuration that differ, also for stock.
        plans: names in :data:`CASES`.
        needs_triton: whether it has kernels of Triton.
    """

    plans: Sequence[str]
    of_size: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    needs_triton: bool = False


ROW_SUMS = "sums of rows by a kernel"
"""A case without deterministic algorithms, which would keep the kernel from running."""
_SEQUENCE: Plan = fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE)
CASES: dict[str, Variant] = {
    **{
        name: Variant(PLANS[name])
        for name in ("ours k=2", "pairs", "ours k=1", "tiles", "dedup", "dedup pairs", "ours k=2 sequence")
    },
    "recompute": Variant(fixed_plan(2), FULL_RECOMPUTE),
    ROW_SUMS: Variant(PLANS["ours k=2"]),
    **{name: Variant(PLANS[name]) for name in ("ours k=4", "experts k=2", "experts k=4")},
    "sequence in pairs": Variant(paired(_SEQUENCE)),
    "graphs": Variant(PLANS["ours k=1"], is_captured=True),
    "graphs in chunks": Variant(PLANS["ours k=2"], is_captured=True),
    "graphs in pairs": Variant(PLANS["pairs"], is_captured=True),
}
"""Plans by name, in the order of their value."""
_LATENT = {"latent": True}
_LATENT_PLANS = ("ours k=2 sequence", "ours k=2", "pairs")
MODELS: dict[str, Model] = {
    "grouped queries": Model(tuple(CASES)),
    "latent attention": Model(_LATENT_PLANS, _LATENT),
    "latent attention, fused rope": Model(_LATENT_PLANS, _LATENT, {"apply_rope_fusion": True}, needs_triton=True),
}


@dataclass
class Repeats:
    """Steps from the same weights.

    Attributes:
        losses: of the first one's micro-batches.
        gradients: of the first one.
        are_equal: whether all of them have the same bits.
        difference: largest relative difference of a parameter's gradient to the first one's.
        not_deterministic: what torch says about an operator; empty where all are deterministic.
        num_eager: micro-batches behind the first step that should have been replayed from graphs, and were not.
    """

    losses: list[float]
    gradients: Gradients
    are_equal: bool = True
    difference: float = 0.0
    not_deterministic: str = ""
    num_eager: int = 0


@dataclass(frozen=True)
class Reference:
    """Reference for a plan's results.

    Attributes:
        losses: of stock's micro-batches in the same precision.
        truth: gradients of stock in fp32.
        errors: of stock's own gradients in the same precision; empty in fp32.
    """

    losses: Sequence[float]
    truth: Gradients
    errors: Mapping[str, float]

    def bound_of(self, name: str) -> float:
        """Largest relative error of a parameter's gradient."""
        return MAX_ERROR_RATIO * self.errors[name] + MAX_EXTRA_ERROR if self.errors else FP32_BOUND


def run(
    record: Recorder,
    place: Place,
    models: Sequence[str] = tuple(MODELS),
    plans: Sequence[str] = tuple(CASES),
    precisions: Sequence[str] = PRECISIONS,
) -> None:
    """Compares all plans of all models in both precisions.

    Args:
        models: names in :data:`MODELS`.
        plans: names in :data:`CASES`.
        precisions: of :data:`PRECISIONS`.
    """
    left_out: list[str] = []
    with mocked_ranks(), deterministic():
        for name in models:
            model = MODELS[name]
            if model.needs_triton and (why := _why_no_triton(place)):
                record.add(name, left_out=why)
                continue
            chosen = [plan for plan in model.plans if plan in plans]
            with record.guarded(name):
                left_out += _compare_model(record, place, name, chosen, precisions)
    if left_out:
        record.add("left out", why="the time of this part is over", names=left_out)


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside the context operators are deterministic or raise an error, and fp32 products are exact."""
    precision, mode = torch.get_float32_matmul_precision(), torch.get_deterministic_debug_mode()
    # cuBLAS reads it when it makes its first handle, so nothing may have multiplied before.
    with mock.patch.dict(os.environ, {_WORKSPACE: _DETERMINISTIC_WORKSPACE}):
        torch.set_float32_matmul_precision("highest")  # no TF32
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            torch.set_float32_matmul_precision(precision)


def _why_no_triton(place: Place) -> str | None:
    from megatron.core.fusions import fused_mla_yarn_rope_apply as kernels

    if not kernels.HAVE_TRITON:
        return "Megatron's fused rope needs Triton, which is not installed"
    if place.is_rehearsal and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton's kernels run on a device, or where TRITON_INTERPRET=1 is set"
    return None


def _compare_model(
    record: Recorder, place: Place, name: str, plans: Sequence[str], precisions: Sequence[str]
) -> list[str]:
    """Compares a model's plans; what was left out because time is over."""
    model = MODELS[name]
    left_out: list[str] = []
    exact = replace(small_work(place, **model.of_size), bf16=False)
    stock = Runner(Variant(config=model.config), exact)
    true = repeated(place, stock)
    _save_stock(record, f"{name}, fp32, stock", true, {})
    for precision in precisions:
        work = replace(exact, bf16=precision == "bf16")
        reference = Reference(true.losses, true.gradients, {})
        if work.bf16:
            rounded = Runner(Variant(config=model.config), work)
            stock.copy_weights(rounded)  # now fp32 computes with the weights that bf16 can hold
            true = repeated(place, stock)
            own = repeated(place, rounded)
            reference = Reference(own.losses, true.gradients, relative_errors(own.gradients, true.gradients))
            _save_stock(record, f"{name}, bf16, stock", own, reference.errors)
        for plan in plans:
            label = f"{name}, {precision}, {plan}"
            if record.time_left_s() < _LEAST_S:
                left_out.append(label)
                continue
            with record.guarded(label):
                variant = CASES[plan]
                variant = replace(variant, config={**model.config, **variant.config})
                make = partial(_prepared, variant, work, stock)
                found = _with_row_sums(place, make()) if plan == ROW_SUMS else repeated(place, make(), make)
                save_comparison(record, label, found, reference, work)
    return left_out


def _prepared(variant: Variant, work: Work, stock: Runner) -> Runner:
    runner = Runner(variant, work)
    runner.copy_weights(stock)
    return runner


def repeated(place: Place, runner: Runner, again: Callable[[], Runner] | None = None) -> Repeats:
    """Runs the step :data:`NUM_REPEATS` times; again without the demand that all operators are deterministic.

    Args:
        again: returns a new runner for that; None for the same one. A plan's step that fails leaves messages behind.
    """
    try:
        return _repeated(place, runner)
    except RuntimeError as error:
        if _NOT_DETERMINISTIC not in str(error):
            raise
        why = str(error).splitlines()[0]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = _repeated(place, runner if again is None else again())
    finally:
        torch.use_deterministic_algorithms(True)
    found.not_deterministic = why
    return found


def _with_row_sums(place: Place, runner: Runner) -> Repeats:
    """Runs the step with the kernel that sums rows, whatever their size.

    Raises:
        RuntimeError: the kernel did not run, although Triton is installed.
    """
    torch.use_deterministic_algorithms(False)
    try:
        with counted_row_sums() as counted:
            found = _repeated(place, runner)
    finally:
        torch.use_deterministic_algorithms(True)
    if counted.is_missing:
        raise RuntimeError("expected the kernel that sums rows, and it did not run")
    found.not_deterministic = "deterministic algorithms are off"
    return found


def _repeated(place: Place, runner: Runner) -> Repeats:
    found: Repeats | None = None
    for _ in range(NUM_REPEATS):
        runner.reset_gradients()
        # The virtual GPU finds a missing order in the first step or in none, and is slow.
        with nullcontext() if place.is_rehearsal and found is not None else place.watch():
            losses = runner.step()
        values = [loss.item() for loss in losses]
        runner.take_times()
        if found is None:
            found = Repeats(values, copies(runner.gradients()))
            continue
        errors = relative_errors(runner.gradients(), found.gradients)
        found.difference = max(found.difference, *errors.values())
        # An error of 0 means equal bits.
        found.are_equal = found.are_equal and found.difference == 0.0 and values == found.losses
    assert found is not None
    if runner.is_captured:
        found.num_eager = (NUM_REPEATS - 1) * runner.num_micro_batches - runner.num_replayed()
    return found


def _save_stock(record: Recorder, label: str, found: Repeats, errors: Mapping[str, float]) -> None:
    """Saves what stock's repeats have shown; in bf16 also whether bounds that follow from its errors see enough."""
    bounds = {name: MAX_ERROR_RATIO * error + MAX_EXTRA_ERROR for name, error in errors.items()}
    values: dict[str, Any] = {
        "losses": found.losses,
        "repeats_equal": found.are_equal,
        "repeats_difference": found.difference,
        "not_deterministic": found.not_deterministic,
    }
    if not bounds:
        record.add(label, **values)
        return
    name, bound = worst(bounds)
    blind = [name for name, bound in bounds.items() if bound > BLIND_ABOVE]
    values |= {"widest_bound": bound, "parameter": name, "blind": blind}
    if len(blind) > MOST_BLIND * len(bounds):
        record.fail(
            label,
            f"the bounds of {len(blind)} of {len(bounds)} parameters, up to {bound:.2g} for {name}, may not see a lost "
            "chunk: stock's bf16 is too far from fp32",
            **values,
        )
    else:
        record.add(label, **values)


def save_comparison(record: Recorder, label: str, found: Repeats, reference: Reference, work: Work) -> None:
    """Saves a plan's errors against its bounds, and whether its repeats are equal."""
    errors = relative_errors(found.gradients, reference.truth)
    of_bound = {name: error / reference.bound_of(name) for name, error in errors.items()}
    name, share = worst(of_bound)
    loss_error = relative_difference(found.losses, reference.losses)
    loss_bound = BF16_LOSS_BOUND if work.bf16 else FP32_LOSS_BOUND
    problems = []
    if not share <= 1:
        problems.append(f"the gradient of {name} is {errors[name]:.3g} away, at most {reference.bound_of(name):.3g}")
    if not loss_error <= loss_bound:
        problems.append(f"a loss is {loss_error:.3g} away, at most {loss_bound:.3g}")
    if found.num_eager:
        problems.append(f"{found.num_eager} micro-batches were not replayed from graphs")
    repeat_bound = BF16_REPEAT_BOUND if work.bf16 else REPEAT_BOUND
    if not found.not_deterministic and not found.are_equal:
        problems.append(f"repeats of the same step differ, by up to {found.difference:.3g} of a gradient's norm")
    elif not found.difference <= repeat_bound:
        problems.append(f"repeats differ by {found.difference:.3g}, at most {repeat_bound:.3g}")
    values = {
        "error_of_bound": share,
        "gradient_error": errors[name],
        "parameter": name,
        "bound": reference.bound_of(name),
        "loss_error": loss_error,
        "repeats_equal": found.are_equal,
        "repeats_difference": found.difference,
        "not_deterministic": found.not_deterministic,
    }
    if problems:
        record.fail(label, "; ".join(problems), **values)
    else:
        record.add(label, **values)
