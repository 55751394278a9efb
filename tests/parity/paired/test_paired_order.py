"""A real paired step runs what the same micro-batches run without pairs, in the order of ``schedule/pairing.py``.

Without pairs the model's forwards and backwards are what the simulator lowers, see
``mocked/test_traced_equals_lowered.py``. Here each of them is cut in front of its waits, and the parts are put together
by :class:`PairedTurns`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import pytest

from megatron_lancet.patching import replaced
from megatron_lancet.schedule.ops import Op, OpKind
from megatron_lancet.schedule.pairing import PairedTurns
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, Segment, fixed_plan, paired
from tests.parity.mocked.recorded_run import EP_SIZE, Event, Model, Recorded, Verb, mocked_ranks

NUM_MICRO_BATCHES = 4
ONE, TWO = fixed_plan(1), fixed_plan(2)
IN_SEGMENTS = Plan((Segment(1, 1, 1), Segment(2, None, 3, ChunkDim.SEQUENCE)), dw_window=4)
PLANS: dict[str, Plan] = {
    "k1": paired(ONE),
    "k1-dw-none": paired(fixed_plan(1, DwPolicy.NONE)),
    "k2": paired(TWO),
    "k2-gate": paired(fixed_plan(2, overlap_range=OverlapRange.GATE)),
    "k3-experts": paired(fixed_plan(3, overlap_range=OverlapRange.EXPERTS)),
    "k1-with-k2-at-ends": paired(ONE, TWO),
    "k2-with-k1-at-ends": paired(TWO, ONE),
    "k1-tiles-with-k2-at-ends": paired(fixed_plan(1, tiles=2), TWO),
    "k1-with-segments-at-ends": paired(ONE, IN_SEGMENTS),
}
MODELS = {"dense-first": Model((0, 1, 1)), "experts": Model((1, 1)), "dense": Model((0, 0))}


@pytest.fixture(scope="module", autouse=True)
def world():
    """One process as rank 0 of four expert-parallel ranks."""
    with mocked_ranks(EP_SIZE, expert_model_parallel_size=EP_SIZE):
        yield


def parts_of(events: Sequence[Event]) -> list[list[Event]]:
    """A forward or a backward, cut in front of its waits for rows."""
    parts: list[list[Event]] = [[]]
    for event in events:
        if event.verb is Verb.WAIT and Op.parse(event.name).kind != OpKind.COUNTS:
            parts.append([])
        parts[-1].append(event)
    return parts


def in_turns(micro_batches: Sequence[Recorded]) -> Iterator[tuple[int, Event]]:
    """The events of a paired step, each with the number of its micro-batch."""
    forwards = [iter(parts_of(micro_batch.forward)) for micro_batch in micro_batches]
    num_run = [0] * len(micro_batches)

    def turns(index: int, up_to: float) -> Iterator[tuple[int, Event]]:
        while num_run[index] < up_to and (part := next(forwards[index], None)) is not None:
            num_run[index] += 1
            yield from ((index + 1, event) for event in part)

    yield from turns(0, float("inf"))
    for index, micro_batch in enumerate(micro_batches):
        backward = parts_of(micro_batch.backward)
        if index + 1 == len(micro_batches):
            yield from ((index + 1, event) for part in backward for event in part)
            return
        order = PairedTurns(len(parts_of(micro_batches[index + 1].forward)) - 1, len(backward) - 1)
        for place, part in enumerate(backward):
            yield from turns(index + 1, order.done_by(place))
            if order.begins_next(place) and index + 2 < len(micro_batches):
                yield from turns(index + 2, 1)
            yield from ((index + 1, event) for event in part)
        yield from turns(index + 1, float("inf"))


WEIGHT_GRADS = (Verb.WEIGHT_GRAD, Verb.WEIGHT_GRAD_INSIDE)
KEPT = (Verb.END, Verb.ISSUE, Verb.WAIT, *WEIGHT_GRADS)


def comparable(events: Iterable[tuple[int, Event]]) -> list[tuple[int, Event]]:
    """Without what depends on other things than the turns.

    Whether a launch waits for token counts depends on the clock. Experts compute their dWs one expert after the other
    only in plans without any chunks, so dWs that follow each other are sorted.
    """
    kept = [
        (number, event)
        for number, event in events
        if event.verb in KEPT and not (event.verb is Verb.WAIT and event.name.endswith(OpKind.COUNTS))
    ]
    result: list[tuple[int, Event]] = []
    for is_dw, group in itertools.groupby(kept, lambda numbered: numbered[1].verb in WEIGHT_GRADS):
        events_of_group = list(group)
        result += sorted(events_of_group) if is_dw else events_of_group
    return result


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_paired_step_runs_in_the_planned_turns(model, plan):
    at_end, in_middle = (model.record(part, {}, False)[0] for part in (plan.at_ends, plan.in_middle))
    expected = comparable(in_turns([at_end, *[in_middle] * (NUM_MICRO_BATCHES - 2), at_end]))
    found = comparable(model.record_pairs(plan, NUM_MICRO_BATCHES))
    pairs = enumerate(itertools.zip_longest(found, expected))
    first = next((index for index, (ours, theirs) in pairs if ours != theirs), None)
    assert first is None, f"from event {first} on: {found[first:][:8]}, not {expected[first:][:8]}"
    assert {number for number, _ in found} == set(range(1, NUM_MICRO_BATCHES + 1))


def test_another_order_of_turns_is_noticed():
    """The runtime and this test share :class:`PairedTurns`: here only the runtime runs every forward at the end."""
    model, plan = MODELS["experts"], PLANS["k1"]
    expected = comparable(in_turns([model.record(plan.in_middle, {}, False)[0]] * NUM_MICRO_BATCHES))
    assert comparable(model.record_pairs(plan, NUM_MICRO_BATCHES)) == expected
    with replaced(PairedTurns, "done_by", lambda turns, place: 1):
        assert comparable(model.record_pairs(plan, NUM_MICRO_BATCHES)) != expected
