"""The ops that a real run traces are the ops, in the order, that the simulator lowers, for every kind of plan.

Four comparisons of each micro-batch of a real step with what the simulator makes of the same plan:

- *steps*: ends of ops, issues of messages and waits for them, forward and backward;
- *weight gradients*: which ones run between which ops and waits. How many find a message still on its way is the
  simulator's to say, so that the clock decides nothing; which ones they are is the store's;
- *reports* to DDP: between which waits a weight's gradient is reported complete;
- *places* of gradient reductions: after which waits they may start where all-to-alls go first.

What the two sides write down differently, and how it is brought into one form, is in :func:`in_lowered_form`.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import pytest

from megatron_lancet.model import transformer_block
from megatron_lancet.patching import replaced
from megatron_lancet.schedule import turns
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.turns import ROWS_MADE_BY, ROWS_NEEDED_BY
from tests.parity.mocked.lowered_cases import cases
from tests.parity.mocked.lowered_plan import (
    MODELS,
    Case,
    Lowered,
    is_cut,
    lowered,
)
from tests.parity.mocked.recorded_run import (
    EP_SIZE,
    NUM_MICRO_BATCHES,
    NUM_STAGES,
    Event,
    Recorded,
    Verb,
    mocked_ranks,
)

CASES = dict(cases())


@pytest.fixture(scope="module", autouse=True)
def world():
    """One process as rank 0 of three pipeline stages with four expert-parallel ranks each."""
    with mocked_ranks(
        EP_SIZE * NUM_STAGES, pipeline_model_parallel_size=NUM_STAGES, expert_model_parallel_size=EP_SIZE
    ):
        yield


STEPS = (Verb.END, Verb.ISSUE, Verb.WAIT)
WEIGHT_GRADS = (Verb.WEIGHT_GRAD, Verb.WEIGHT_GRAD_INSIDE)


def in_lowered_form(traced: Sequence[Event], phase: Phase, counts: frozenset[str]) -> list[Event]:
    """Steps and weight gradients of a pass as the simulator would have written them down.

    - Token counts are waited for where a transport needs them; in the simulation their message only holds up the
      dispatch. Such waits go.
    - The end of an op that makes a message is reported after the message was issued. The end goes in front.
    - A weight gradient that runs at once runs before the op that made it ready is reported, and what is left at the
      end of the pass runs before the embedding is. Such gradients go behind the op.
    - A micro-batch is cut before its chunks and put together behind them, two parts of one op; the simulation has it
      at the second place (in the backward: at the first). The other one goes.
    - The residual is added behind the sum of a token's rows, and where the layer is whole but for its experts, on the
      unchunked micro-batch, reported as the first chunk's. Only the sum is kept, where the simulation has both.

    Args:
        counts: names of the token counts' messages.
    """
    kept = [event for event in traced if event.verb in (*STEPS, *WEIGHT_GRADS)]
    kept = [event for event in kept if event.verb is not Verb.WAIT or event.name not in counts]
    kept = with_ends_before_issues(with_weight_grads_behind_ops(kept))
    if phase is Phase.FORWARD:
        return list(without_second_parts(kept))
    return list(without_second_parts(kept[::-1]))[::-1]


def with_weight_grads_behind_ops(events: Iterable[Event]) -> list[Event]:
    result: list[Event] = []
    inside: list[Event] = []
    for event in events:
        if event.verb is Verb.WEIGHT_GRAD_INSIDE:
            inside.append(Event(Verb.WEIGHT_GRAD, event.name))
            continue
        result.append(event)
        if event.verb is Verb.END:
            result += inside
            inside = []
    return result + inside


def with_ends_before_issues(events: Sequence[Event]) -> list[Event]:
    result = list(events)
    for index, (event, after) in enumerate(pairwise(events)):
        if (event.verb, after.verb) == (Verb.ISSUE, Verb.END) and makes(after.name, event.name):
            result[index : index + 2] = after, event
    return result


def makes(op: str, message: str) -> bool:
    """Whether an op makes the rows of a message, or their gradients. Of several tiles one op makes all."""
    sent = Op.parse(message)
    made_by = ROWS_MADE_BY if sent.phase is Phase.FORWARD else ROWS_NEEDED_BY
    maker = made_by.get(OpKind(sent.kind))  # counts have none
    return maker is not None and str(sent.with_kind(maker)) == op


def without_second_parts(events: Iterable[Event]) -> Iterator[Event]:
    """Args: events: from the first to the last of a forward, from the last to the first of a backward."""
    ended: set[str] = set()
    before = None
    is_first_cut = True
    for event in events:
        is_end = event.verb is Verb.END
        is_end_of_cut = is_end and is_cut(event.name)
        behind_own_part = before is not None and (before == event or is_cut(before.name))
        is_second = is_end and event.name in ended and behind_own_part
        if not (is_first_cut if is_end_of_cut else is_second):
            yield event
        if is_end_of_cut:
            is_first_cut = not is_first_cut
        elif is_end:
            ended.add(event.name)
        before = event


def of_verbs(events: Iterable[Event], *verbs: Verb) -> list[Event]:
    return [event for event in events if event.verb in verbs]


def check(case: Case, expected: Lowered, micro_batch: Recorded) -> None:
    """Compare one micro-batch of a real step."""
    forward = in_lowered_form(micro_batch.forward, Phase.FORWARD, expected.counts)
    backward = in_lowered_form(micro_batch.backward, Phase.INPUT_GRAD, expected.counts)
    same("forward", forward, expected.steps[Phase.FORWARD])
    same("backward", of_verbs(backward, *STEPS), expected.steps[Phase.INPUT_GRAD])
    same("weight gradients", of_verbs(backward, Verb.END, Verb.WAIT, Verb.WEIGHT_GRAD), expected.weight_grads)
    same("reports", of_verbs(micro_batch.backward, Verb.WAIT, Verb.REPORT), expected.reports)
    if case.has_priority:
        same("places", of_verbs(micro_batch.backward, Verb.WAIT, Verb.REDUCE), expected.places)


def same(what: str, traced: Sequence[Event], lowered: Sequence[Event]) -> None:
    """Fail with the first difference and what is around it."""
    ours, theirs = ([f"{event.verb} {event.name}" for event in events] for events in (traced, lowered))
    first = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(theirs))
    around = slice(max(0, first - 4), first + 8)
    if ours != theirs:
        pytest.fail(f"{what}, from event {first} on: traced {ours[around]}, lowered {theirs[around]}")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_traced_ops_are_the_lowered_ops(case):
    expected = lowered(case)
    micro_batches = MODELS[case.model].record(expected.plan, expected.num_filled, case.has_priority)
    assert len(micro_batches) == NUM_MICRO_BATCHES
    for micro_batch in micro_batches:
        check(case, expected, micro_batch)


@pytest.fixture(scope="module")
def compared():
    """A plan, what it is lowered to, and a micro-batch that ran by it."""
    case = CASES["priority-k2-stack"]
    expected = lowered(case)
    micro_batch = MODELS[case.model].record(expected.plan, expected.num_filled, case.has_priority)[0]
    check(case, expected, micro_batch)
    return case, expected, micro_batch


def swapped(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Every list in which two neighbours have changed places."""
    for index, (event, after) in enumerate(pairwise(events)):
        yield [*events[:index], after, event, *events[index + 2 :]]


def shortened(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Every list without one of the events."""
    for index in range(len(events)):
        yield [*events[:index], *events[index + 1 :]]


MUTATIONS = {"two-swapped": swapped, "one-missing": shortened}


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.INPUT_GRAD])
@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS)
def test_lowered_comparison_detects_another_order_of_steps(compared, phase, mutate):
    case, expected, micro_batch = compared
    assert len(expected.steps[phase]) > 50
    for steps in mutate(expected.steps[phase]):
        other = dataclasses.replace(expected, steps={**expected.steps, phase: steps})
        with pytest.raises(pytest.fail.Exception, match=r"^(forward|backward), from event"):
            check(case, other, micro_batch)


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS)
@pytest.mark.parametrize("what", ["weight_grads", "reports", "places"])
def test_comparison_detects_another_order_of_dws(compared, what, mutate):
    case, expected, micro_batch = compared
    for events in mutate(getattr(expected, what)):
        if events != getattr(expected, what):  # reductions are all alike
            with pytest.raises(pytest.fail.Exception, match=f"^{what.replace('_grads', ' gradients')}, from event"):
                check(case, dataclasses.replace(expected, **{what: events}), micro_batch)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.INPUT_GRAD])
def test_lowered_comparison_detects_a_missing_step(compared, phase):
    """But for the parts that :func:`in_lowered_form` takes for one: of a cut, and of the sum with the residual."""
    case, expected, micro_batch = compared
    field = "forward" if phase is Phase.FORWARD else "backward"
    events = getattr(micro_batch, field)
    num_unnoticed = 0
    for others in shortened(events):
        try:
            check(case, expected, micro_batch._replace(**{field: others}))
        except pytest.fail.Exception:
            continue
        num_unnoticed += 1
    names = [event.name for event in events if event.verb is Verb.END]
    num_doubled = sum(2 for name in set(names) if names.count(name) > 1 and not is_cut(name))
    num_counts_waits = sum(event.verb is Verb.WAIT and event.name in expected.counts for event in events)
    assert num_unnoticed == num_doubled + num_counts_waits


def test_program_that_is_not_the_planned_one_is_noticed(compared):
    """The model and the simulator share the table of turns: here only the model's chunks take turns in reverse."""
    case, expected, _ = compared

    def reversed_turns(layers, num_chunks, overlap_range, wiring):
        def mirrored(chunk: int) -> int:
            return num_chunks - 1 - chunk

        instructions = turns.program(layers, num_chunks, overlap_range, wiring)
        return [
            one._replace(chunk=mirrored(one.chunk)) if isinstance(one, turns.Instruction) else one
            for one in instructions
        ]

    with replaced(transformer_block, "program", reversed_turns):
        micro_batch = MODELS[case.model].record(expected.plan, expected.num_filled, case.has_priority)[0]
    with pytest.raises(pytest.fail.Exception, match=r"^forward, from event"):
        check(case, expected, micro_batch)
