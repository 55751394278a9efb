"""The store of dWs and the scheduler of reductions against the simulator, for the same backward pass.

Both must run dWs in the same order and launch the same micro-ops behind the same all-to-alls.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.features.comm_priority.comm_scheduler import CommScheduler, PendingReduction
from megatron_lancet.planning.simulation.buckets import Buckets, Reduction, WeightKind
from megatron_lancet.planning.simulation.cost_model import DwCost
from megatron_lancet.planning.simulation.engine import Engine
from megatron_lancet.planning.simulation.links import LaunchReduction, Links, Network, SerialLinks
from megatron_lancet.planning.simulation.lowering import Action, Step
from megatron_lancet.runtime.weight_grad_store import DeferredWeight
from megatron_lancet.schedule import ops
from megatron_lancet.schedule.dw_queue import DwRules
from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.schedule.reductions import MicroOps
from megatron_lancet.schedule.timeline import Lane
from tests.draws import examples
from tests.fakes import MicroOp, cpu_stats, store_without_autograd

LAYER = 1
WEIGHTS = ("a", "b", "c")
NUM_PARTS = 3
LONG_MS = 1e6


@dataclass(frozen=True)
class Put:
    """A dW becomes ready; ``is_last`` if it is the last one of its weight."""

    weight: str
    num_bytes: int
    is_last: bool


@dataclass(frozen=True)
class Issue:
    index: int


@dataclass(frozen=True)
class Wait:
    """All-to-alls are waited for in the order of their issue."""

    index: int


@dataclass(frozen=True)
class BackwardPass:
    """
    Attributes:
        kinds: of its all-to-alls.
        are_long: whether there is time for all pending dWs while an all-to-all is waited for, or for none.
    """

    events: tuple[Put | Issue | Wait, ...]
    kinds: tuple[str, ...]
    are_long: tuple[bool, ...]


@st.composite
def backward_passes(draw):
    order = draw(st.lists(st.sampled_from([*WEIGHTS, "issue", "wait", "exchange"]), max_size=40))
    last = {name: index for index, name in enumerate(order)}
    events: list[Put | Issue | Wait] = []
    num_issued = num_waited = 0
    for index, what in enumerate(order):
        if what in WEIGHTS:
            events.append(Put(what, draw(st.integers(1, 100)), last[what] == index))
        if what in ("issue", "exchange"):
            events.append(Issue(num_issued))
            num_issued += 1
        if what in ("wait", "exchange") and num_waited < num_issued:
            events.append(Wait(num_waited))
            num_waited += 1
    events += [Wait(index) for index in range(num_waited, num_issued)]
    kinds = draw(st.lists(st.sampled_from(["dispatch", "combine"]), min_size=num_issued, max_size=num_issued))
    are_long = draw(st.lists(st.booleans(), min_size=num_issued, max_size=num_issued))
    return BackwardPass(tuple(events), tuple(kinds), tuple(are_long))


@st.composite
def passes_and_rules(draw):
    """A backward pass, and rules with gaps at its own all-to-alls."""
    backward = draw(backward_passes())
    names = st.sampled_from([*(f"L{LAYER}.W.{name}" for name in WEIGHTS), "of no model"])
    planned = st.lists(names, max_size=4).map(tuple)
    gaps = {str(_op(index, kind)): draw(planned) for index, kind in enumerate(backward.kinds)}
    has_gaps = draw(st.booleans())
    return backward, DwRules(draw(st.integers(0, 8)), draw(st.none() | st.integers(1, 250)), gaps if has_gaps else {})


def _op(index: int, kind: str) -> Op:
    return Op(LAYER, index, Phase.INPUT_GRAD, kind)


class Found(NamedTuple):
    """
    Attributes:
        ran: names of dWs in the order in which they ran, and of all-to-alls where their wait ended.
        launched: micro-ops in their order, each with the number of all-to-alls that had been waited for.
    """

    ran: list[str]
    launched: list[tuple[str, int]]


def run(backward: BackwardPass, rules: DwRules, part_bytes: int, chunk_bytes: int, host_polls: bool) -> Found:
    """By the runtime."""
    found, num_waited = Found([], []), 0
    stats = cpu_stats()
    store, scheduler = store_without_autograd(rules, stats), CommScheduler(MicroOps(chunk_bytes), stats)

    def report(name: str) -> None:
        reduction = PendingReduction(scheduler)
        reduction.micro_ops += [
            MicroOp(f"{name}.{index}", part_bytes, lambda part: found.launched.append((part, num_waited)))
            for index in range(NUM_PARTS)
        ]
        scheduler.put(reduction)

    weights = {
        name: DeferredWeight(torch.nn.Parameter(torch.zeros(1)), f"L{LAYER}.W.{name}", lambda name=name: report(name))
        for name in WEIGHTS
    }
    for _ in backward.kinds:
        scheduler.expect_backward()
    for event in backward.events:
        match event:
            case Put(name, num_bytes, is_last):
                weight = weights[name]
                store.put([weight], lambda name=weight.name: found.ran.append(name), num_bytes)
                if is_last:
                    store.mark_last_use(weight)
            case Issue():
                scheduler.issued()
            case Wait(index):
                op = _op(index, backward.kinds[index])
                if host_polls:
                    store.fill(lambda index=index: backward.are_long[index], op)
                else:
                    store.run_ahead(op)
                num_waited += 1
                found.ran.append(str(op))
                store.advance_window()
                scheduler.passed(op)
    store.flush()
    scheduler.end_step()
    return found


class ScriptedLinks(Links):
    """Each message takes as long as it says, whatever else is on its way; reductions take no time."""

    def send(self, message, clock):
        message.arrival_ms = [message.ready_ms + alone_ms for alone_ms in message.alone_ms]
        clock.arrive(message, range(len(message.arrival_ms)))

    def advance(self, time_ms, event, clock):
        assert isinstance(event, LaunchReduction)
        clock.reduce(event.reduction, [time_ms], time_ms)


def steps(backward: BackwardPass) -> list[Step]:
    """For the engine. An op of a millisecond goes before each step, so that no two things happen at once."""
    lowered: list[Step] = []
    for event in backward.events:
        dws = ((DwCost(event.weight, 1.0, event.num_bytes),),) if isinstance(event, Put) else ((),)
        lowered.append((ops.Compute, LAYER, Action("op", 0, (0.0,), (1.0,), weight_grads=dws)))
        if not isinstance(event, Put):
            verb, index = ops.Launch if isinstance(event, Issue) else ops.Wait, event.index
            # Waits are in the order of issues: a long message comes later than all that was waited for before it.
            ms = LONG_MS * (index + 1) if backward.are_long[index] else 0.0
            action = Action(backward.kinds[index], index, (), (ms,), (), (0,), (), (0.0,), slot=index)
            lowered.append((verb, LAYER, action))
    return lowered


def simulate(backward: BackwardPass, rules: DwRules, part_bytes: int, chunk_bytes: int, host_polls: bool) -> Found:
    """By the simulator."""
    num_puts = Counter((LAYER, event.weight) for event in backward.events if isinstance(event, Put))
    reductions = [
        Reduction(f"{name}.{index}", WeightKind.DENSE, 0.0, part_bytes)
        for _, name in num_puts
        for index in range(NUM_PARTS)
    ]
    buckets = Buckets(
        bucket_of={weight: number for number, weight in enumerate(num_puts)},
        num_weights=(1,) * len(num_puts),
        reductions=tuple(reductions),
        first_reduction=tuple(range(0, len(reductions) + 1, NUM_PARTS)),
        num_puts=dict(num_puts),
        late=frozenset(),
        num_all_to_alls=len(backward.kinds),
        chunk_bytes=chunk_bytes,
    )
    network = Network(0.0, True, 1.0, (2,), host_polls=host_polls)
    engine = Engine(
        ScriptedLinks(network),
        SerialLinks(network),
        steps(backward),
        Phase.INPUT_GRAD,
        rules,
        record=True,
        buckets=buckets,
    )
    result = engine.run([0.0])
    (spans,), (waits,) = result.spans, result.waits
    names = {reduction.name for reduction in reductions}
    dws = [(span.end_ms, 0, span.name) for span in spans if span.lane is Lane.COMPUTE and ".W." in span.name]
    ended = sorted(dws + [(wait.end_ms, 1, wait.name) for wait in waits], key=lambda event: event[:2])
    return Found(
        [name for _, _, name in ended],
        [
            (span.name, sum(wait.end_ms <= span.start_ms for wait in waits))
            for span in spans
            if span.lane is Lane.COMM and span.name in names
        ],
    )


@pytest.mark.thorough
@examples(300)
@given(passes_and_rules(), st.integers(1, 60), st.integers(30, 100), st.booleans())
def test_runtime_and_simulator_run_dws_and_reductions_alike(backward_and_rules, part_bytes, chunk_bytes, host_polls):
    backward, rules = backward_and_rules
    found = run(backward, rules, part_bytes, chunk_bytes, host_polls)
    assert found == simulate(backward, rules, part_bytes, chunk_bytes, host_polls)
    puts = [event.weight for event in backward.events if isinstance(event, Put)]
    assert len(found.ran) == len(puts) + len(backward.kinds)
    assert len(found.launched) == NUM_PARTS * len(set(puts))
