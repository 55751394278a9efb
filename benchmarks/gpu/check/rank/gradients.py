"""Gradients of each plan on real ranks against stock's, and the order in which the ranks launch collectives."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.check.rank.place import RankPlace
from benchmarks.gpu.sizes import SIZES
from benchmarks.gpu.variants import PLANS, Reduction, Runner, Variant, Work
from benchmarks.gradient_error import relative_errors, worst
from megatron_lancet.patching import around
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.exchange import Exchange
from megatron_lancet.schedule.plan import DwPolicy, Plan, fixed_plan

TOLERANCE = 1e-4
"""Of a gradient's norm in fp32. Chunks change the order of sums, and on a device atomic additions change stock's."""
NUM_MICRO_BATCHES = 2
_NUM_STEPS = 2
"""In DDP's second step reductions start as gradients become ready."""
_SIZE = replace(SIZES["tiny"], moe_every=1, experts_per_rank=4)


class WrongResultError(RuntimeError):
    """Ranks that run a plan computed or sent something else than expected."""


@dataclass(frozen=True)
class Case:
    """Two steps of a plan, against two of stock.

    Attributes:
        then: plan of the second step, where the run switches.
        replicas: of all experts: groups of ranks that hold each of them once.
    """

    plan: Plan
    then: Plan | None = None
    reduction: Reduction = Reduction.ALL_REDUCE
    replicas: int = 1

    @property
    def last_plan(self) -> Plan:
        """That of the second step."""
        return self.then or self.plan


def _plan(variant: str) -> Plan:
    plan = PLANS[variant]
    assert plan is not None
    return plan


CASES = {
    **{name: Case(_plan(name)) for name in ("ours k=1", "ours k=2", "pairs", "ours k=2 sequence", "tiles", "dedup")},
    "dW at once, then k=2": Case(fixed_plan(1, DwPolicy.NONE), then=fixed_plan(2)),
    "ours k=2, distributed optimizer": Case(fixed_plan(2), reduction=Reduction.REDUCE_SCATTER),
    "pairs, distributed optimizer": Case(_plan("pairs"), reduction=Reduction.REDUCE_SCATTER),
    "dedup pairs": Case(_plan("dedup pairs")),
    "ours k=2, two replicas": Case(fixed_plan(2), reduction=Reduction.REDUCE_SCATTER, replicas=2),
}
"""In the order of their value."""


def title_of(case: str) -> str:
    """Name of a case's result."""
    return f"gradients {case}"


type _Gradients = list[dict[str, torch.Tensor]]
"""Of each step."""


@dataclass
class Found:
    """What two steps of a case have given on this rank.

    Attributes:
        errors: of each parameter's gradient, relative to stock's; the largest of the steps.
        num_messages: with rows, in the second step.
        num_reports: of each deferred weight to DDP, in both steps.
        order: what this rank launched, in its order.
    """

    errors: dict[str, float]
    num_messages: int
    num_reports: list[int]
    order: list[str]


class GradientCases:
    """Runs cases one by one; stock's gradients are computed once for each kind of groups and reduction."""

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        self._stock: dict[tuple[int, Reduction], _Gradients] = {}

    def run(self, case: Case) -> Found:
        """Runs both steps of a case. Collective over the ranks."""
        place = self._place
        num_sharing = place.num_ranks // case.replicas
        place.share_experts(num_sharing)
        size = replace(_SIZE, experts_per_rank=_SIZE.experts_per_rank * case.replicas)
        work = Work(
            size, num_sharing, NUM_MICRO_BATCHES, place.device, bf16=False, rank=place.rank, reduction=case.reduction
        )
        stock = self._stock_gradients(case, work)
        order: list[str] = []
        runner = Runner(Variant(case.plan, plans_switch=case.then is not None), work)
        place.watchdog.position = lambda: runner.position
        with noted_launches(order):
            ours = _steps(runner, case.then)
        errors = [relative_errors(*both) for both in zip(ours, stock, strict=True)]
        return Found(
            errors={name: max(error[name] for error in errors) for name in errors[0]},
            num_messages=runner.take_times().num_all_to_alls,
            num_reports=runner.num_reports(),
            order=order if place.keeps_order else sorted(order),
        )

    def _stock_gradients(self, case: Case, work: Work) -> _Gradients:
        key = case.replicas, case.reduction
        if key not in self._stock:
            runner = Runner(Variant(), work)
            self._place.watchdog.position = lambda: runner.position
            self._stock[key] = _steps(runner)
        return self._stock[key]


def _steps(runner: Runner, then: Plan | None = None) -> _Gradients:
    gradients = []
    for step in range(_NUM_STEPS):
        if step and then is not None:
            runner.switch(then)
        runner.take_times()
        runner.reset_gradients()
        runner.step()
        gradients.append({name: gradient.clone() for name, gradient in runner.gradients().items()})
    return gradients


@contextmanager
def noted_launches(order: list[str]) -> Iterator[None]:
    """Notes each exchange of counts, message with rows and reduction that is launched inside the context."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    lock = threading.Lock()

    def note(text: str) -> None:
        with lock:
            order.append(text)

    def counts(stock: Any, comm: Comm, op: Any, *args: Any, **kwargs: Any) -> Any:
        note(str(op))
        return stock(comm, op, *args, **kwargs)

    def rows(stock: Any, exchange: Exchange, *args: Any, **kwargs: Any) -> Any:
        note(str(exchange.op))
        return stock(exchange, *args, **kwargs)

    def reduction(stock: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        note(f"reduction of {sum(bucket.grad_data.numel() for bucket in group.buckets)}")
        return stock(group, *args, **kwargs)

    with (
        around(Comm, "launch_counts", counts),
        around(Exchange, "launch", rows),
        around(_ParamAndGradBucketGroup, "start_grad_sync", reduction),
    ):
        yield


def check(case: Case, found: Found, num_sharing: int) -> dict[str, Any]:
    """What is saved of a case.

    Raises:
        WrongResultError: a gradient, the number of messages or the number of reports is wrong.
    """
    name, error = worst(found.errors)
    if not error <= TOLERANCE:
        raise WrongResultError(
            f"the gradient of {name} is {error:.2g} of its norm away from stock's; at most {TOLERANCE:g} was expected"
        )
    expected = num_messages(case.last_plan)
    if num_sharing > 1 and found.num_messages != expected:
        raise WrongResultError(f"the second step sent {found.num_messages} messages, and {expected} were expected")
    expected = _NUM_STEPS * NUM_MICRO_BATCHES
    if set(found.num_reports) - {expected}:
        raise WrongResultError(f"weights were reported {sorted(set(found.num_reports))} times, expected {expected}")
    return {"error_vs_stock": error, "parameter": name, "messages": found.num_messages, "order": found.order}


def num_messages(plan: Plan) -> int:
    """Messages with rows of a step, in which all layers have experts."""
    (segment,) = plan.segments
    forward = segment.all_to_alls_per_layer(plan.dispatch) * _SIZE.num_layers
    return 2 * forward * NUM_MICRO_BATCHES
