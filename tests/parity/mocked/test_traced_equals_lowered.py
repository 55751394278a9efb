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

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.model import transformer_block
from megatron_lancet.patching import replaced
from megatron_lancet.schedule import turns
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.plan import (
    ChunkDim,
    DwPolicy,
    Gap,
    LocalTokens,
    OverlapRange,
    Plan,
    Segment,
    fixed_plan,
)
from megatron_lancet.schedule.turns import ROWS_MADE_BY, ROWS_NEEDED_BY
from tests.parity.mocked.lowered_plan import (
    FAST_MS,
    LAYERS_PER_STAGE,
    MODELS,
    PIPELINE,
    SLOW_MS,
    Case,
    Lowered,
    is_cut,
    lowered,
)
from tests.parity.mocked.recorded_run import (
    EP_SIZE,
    NUM_MICRO_BATCHES,
    NUM_STAGES,
    PINNED_BYTES,
    Event,
    Recorded,
    Verb,
    mocked_ranks,
)


def segmented(*segments: Segment, **fields) -> Plan:
    return Plan(segments, **{"dw_window": 6, **fields})


def each_stage(num_chunks: int, overlap_range: OverlapRange = OverlapRange.STACK) -> Plan:
    ends = range(LAYERS_PER_STAGE, len(PIPELINE) + 1, LAYERS_PER_STAGE)
    segments = [Segment(end - LAYERS_PER_STAGE + 1, end, num_chunks, range=overlap_range) for end in ends]
    return segmented(*segments)


BATCH, SEQUENCE = ChunkDim
EXPERTS, GATE, STACK = OverlapRange
GAPS = (
    Gap("L4.c0.I.dispatch", ("W.output_layer", "L4.W.mlp.shared_experts.linear_fc1")),
    Gap("L3.c1.I.combine", ("L4.W.self_attention.linear_proj", "L9.W.no_such_layer", "L4.W.self_attention.linear_qkv")),
    Gap("L1.c1.I.combine", ("L3.W.mlp.experts.local_experts.1.linear_fc1", "L2.W.mlp.linear_fc2")),
)


def cases() -> Iterator[tuple[str, Case]]:
    for over in OverlapRange:
        yield f"k1-{over}", Case(fixed_plan(1, overlap_range=over))
        for num_chunks in (2, 3, 4):
            for dim in ChunkDim:
                plan = fixed_plan(num_chunks, chunk_dim=dim, overlap_range=over)
                yield f"k{num_chunks}-{dim}-{over}", Case(plan)
    yield "k5-sequence-stack", Case(fixed_plan(5, chunk_dim=SEQUENCE))
    for num_chunks in (1, 2):
        yield f"k{num_chunks}-dw-none", Case(fixed_plan(num_chunks, DwPolicy.NONE))
        yield f"k{num_chunks}-dw-fill-slow-link", Case(fixed_plan(num_chunks), message_ms=SLOW_MS)
        yield f"k{num_chunks}-dw-fill-fast-link", Case(fixed_plan(num_chunks), message_ms=FAST_MS)
        for num_bytes in (PINNED_BYTES // 2, 3 * PINNED_BYTES + 1):
            plan = fixed_plan(num_chunks, dw_memory_bytes=num_bytes)
            yield f"k{num_chunks}-dw-memory-{num_bytes}", Case(plan, message_ms=FAST_MS)
    yield "k2-dw-memory-medium-link", Case(fixed_plan(2, dw_memory_bytes=5 * PINNED_BYTES))
    for window in (1, 3, 100):
        plan = dataclasses.replace(fixed_plan(2), dw_window=window)
        yield f"k2-dw-window-{window}", Case(plan)
        yield f"k2-dw-window-{window}-gaps", Case(dataclasses.replace(plan, gaps=GAPS))
        yield f"k2-dw-window-{window}-gaps-slow-link", Case(dataclasses.replace(plan, gaps=GAPS), message_ms=SLOW_MS)
    for num_chunks in (1, 2):
        yield f"k{num_chunks}-dw-fitted-gaps", Case(fixed_plan(num_chunks), message_ms=4.0, has_fitted_gaps=True)
    yield from cases_without_polling()
    yield from segment_cases()
    for model in ("no-shared-experts", "full-recompute", "selective-recompute"):
        for num_chunks, dim, over in ((1, BATCH, STACK), (2, BATCH, STACK), (3, SEQUENCE, STACK), (2, BATCH, EXPERTS)):
            yield f"{model}-k{num_chunks}-{over}", Case(fixed_plan(num_chunks, DwPolicy.FILL, dim, over), model)
        yield f"{model}-k2-dw-none", Case(fixed_plan(2, DwPolicy.NONE), model)
    for num_chunks in (1, 2):
        yield f"padded-k{num_chunks}-experts", Case(fixed_plan(num_chunks, overlap_range=EXPERTS), "padded")
    yield "padded-segments", Case(segmented(Segment(1, 2, 1), Segment(3, 3, 2, SEQUENCE, EXPERTS)), "padded")
    for model in ("mtp", "mtp-repeated"):
        for num_chunks, dim, over in ((1, BATCH, STACK), (3, SEQUENCE, STACK), (2, BATCH, EXPERTS)):
            yield f"{model}-k{num_chunks}-{over}", Case(fixed_plan(num_chunks, DwPolicy.FILL, dim, over), model)
        yield f"{model}-k2-stack", Case(fixed_plan(2), model, has_priority=True)
        yield f"{model}-k2-dw-none", Case(fixed_plan(2, DwPolicy.NONE), model)
        yield f"{model}-k2-dw-fitted-gaps", Case(fixed_plan(2), model, message_ms=4.0, has_fitted_gaps=True)
        yield f"{model}-segments", Case(segmented(Segment(1, 3, 2), Segment(4, 4, 3, SEQUENCE)), model)
    for stage in range(NUM_STAGES):
        for num_chunks, over in ((1, STACK), (2, STACK), (2, GATE), (3, STACK)):
            yield f"stage-{stage}-k{num_chunks}-{over}", Case(each_stage(num_chunks, over), f"stage-{stage}")
    yield from hybrid_cases()
    for over in OverlapRange:
        for num_chunks in (1, 2):
            plan = fixed_plan(num_chunks, overlap_range=over)
            yield f"priority-k{num_chunks}-{over}", Case(plan, has_priority=True)
    yield "priority-dw-none", Case(fixed_plan(2, DwPolicy.NONE), has_priority=True)
    for num_chunks, over in ((1, STACK), (2, STACK), (3, STACK)):
        plan = dataclasses.replace(fixed_plan(num_chunks, overlap_range=over), dispatch=DEDUP)
        yield f"dedup-k{num_chunks}-{over}", Case(plan, "full-recompute" if num_chunks == 3 else "shared-experts")
    yield from two_hop_cases()
    yield from tile_cases()
    yield from wired_cases()
    yield "priority-stage-1", Case(each_stage(2), "stage-1", has_priority=True)


def two_hop_cases() -> Iterator[tuple[str, Case]]:
    for num_chunks, dim, over in ((1, BATCH, STACK), (2, BATCH, STACK), (3, SEQUENCE, STACK), (2, BATCH, EXPERTS)):
        plan = fixed_plan(num_chunks, DwPolicy.FILL, dim, over, dispatch=TWO_HOP)
        yield f"two-hop-k{num_chunks}-{over}", Case(plan, "two-nodes", has_priority=True)
    plan = fixed_plan(2, dispatch=TWO_HOP)
    yield "two-hop-k2-slow-link", Case(plan, "two-nodes", message_ms=SLOW_MS, has_priority=True)
    yield "two-hop-k2-fitted-gaps", Case(plan, "two-nodes", message_ms=4.0, has_fitted_gaps=True)
    yield "two-hop-k2-cuda-fitted-gaps", Case(plan, "two-nodes", has_fitted_gaps=True, host_polls=False)


def tile_cases() -> Iterator[tuple[str, Case]]:
    half, after = LocalTokens
    for num_chunks, tiles, local_tokens in ((1, 1, after), (1, 2, half), (1, 4, after), (2, 1, half), (2, 3, after)):
        plan = fixed_plan(num_chunks, tiles=tiles, local_tokens=local_tokens)
        yield f"tiles-{tiles}-{local_tokens}-k{num_chunks}", Case(plan, has_priority=True)
    plan = fixed_plan(1, tiles=2)
    yield "tiles-dw-none", Case(fixed_plan(1, DwPolicy.NONE, tiles=2, local_tokens=after), "no-shared-experts")
    yield "tiles-slow-link", Case(plan, message_ms=SLOW_MS)
    yield "tiles-fitted-gaps", Case(plan, message_ms=4.0, has_fitted_gaps=True)
    yield "tiles-cuda-fitted-gaps", Case(plan, has_fitted_gaps=True, host_polls=False)
    yield "tiles-dedup-full-recompute", Case(dataclasses.replace(plan, dispatch=DEDUP), "full-recompute")
    yield "tiles-padded", Case(fixed_plan(1, overlap_range=EXPERTS, tiles=2), "padded")
    yield "tiles-segments", Case(segmented(Segment(1, 2, 2, SEQUENCE), Segment(3, None, 1, tiles=2)))


def wired_cases() -> Iterator[tuple[str, Case]]:
    for num_chunks, dim in ((1, BATCH), (2, BATCH), (3, SEQUENCE)):
        plan = fixed_plan(num_chunks, chunk_dim=dim)
        yield f"wired-pairs-k{num_chunks}", Case(plan, "wired-pairs", has_priority=True)
    for message_ms in (SLOW_MS, FAST_MS):
        yield f"wired-pairs-k1-{message_ms}-ms", Case(fixed_plan(1), "wired-pairs", message_ms)
    yield "wired-pairs-dw-none", Case(fixed_plan(1, DwPolicy.NONE), "wired-pairs")
    yield "wired-pairs-dedup", Case(fixed_plan(1, dispatch=DEDUP), "wired-pairs")
    yield "wired-pairs-fitted-gaps", Case(fixed_plan(1), "wired-pairs", message_ms=4.0, has_fitted_gaps=True)
    yield "wired-pairs-cuda-fitted-gaps", Case(fixed_plan(1), "wired-pairs", has_fitted_gaps=True, host_polls=False)


def cases_without_polling() -> Iterator[tuple[str, Case]]:
    for window in (1, 3, 100):
        plan = dataclasses.replace(fixed_plan(2), dw_window=window)
        yield f"k2-cuda-dw-window-{window}", Case(plan, host_polls=False)
        yield f"k2-cuda-dw-window-{window}-gaps", Case(dataclasses.replace(plan, gaps=GAPS), host_polls=False)
        yield f"k2-cuda-dw-window-{window}-fitted-gaps", Case(plan, has_fitted_gaps=True, host_polls=False)
    for num_chunks, model in ((1, "shared-experts"), (2, "hybrid")):
        plan = fixed_plan(num_chunks, dw_memory_bytes=5 * PINNED_BYTES)
        yield f"{model}-k{num_chunks}-cuda-dw-memory-fitted-gaps", Case(plan, model, 4.0, False, True, False)


def hybrid_cases() -> Iterator[tuple[str, Case]]:
    for over in OverlapRange:
        for num_chunks, dim in ((1, BATCH), (2, BATCH), (3, SEQUENCE)):
            plan = fixed_plan(num_chunks, chunk_dim=dim, overlap_range=over)
            yield f"hybrid-k{num_chunks}-{dim}-{over}", Case(plan, "hybrid")
    yield "hybrid-k2-dw-none", Case(fixed_plan(2, DwPolicy.NONE), "hybrid")
    yield "hybrid-k2-slow-link", Case(fixed_plan(2), "hybrid", message_ms=SLOW_MS)
    yield "hybrid-k2-dw-fitted-gaps", Case(fixed_plan(2), "hybrid", message_ms=4.0, has_fitted_gaps=True)
    yield (
        "hybrid-segments",
        Case(segmented(Segment(1, 2, 2), Segment(3, 4, 1), Segment(5, 5, 2, BATCH, GATE)), "hybrid"),
    )
    yield "hybrid-priority", Case(fixed_plan(2), "hybrid", has_priority=True)


def segment_cases() -> Iterator[tuple[str, Case]]:
    yield "segments-batch-then-sequence", Case(segmented(Segment(1, 2, 2), Segment(3, None, 3, SEQUENCE)))
    yield "segments-whole-then-gate", Case(segmented(Segment(1, 1, 1), Segment(2, 4, 4, BATCH, GATE), gaps=GAPS))
    yield (
        "segments-each-range",
        Case(
            segmented(
                Segment(1, 1, 2, SEQUENCE),
                Segment(2, 2, 1),
                Segment(3, 3, 3, BATCH, EXPERTS),
                Segment(4, 4, 2, SEQUENCE, GATE),
                dw_memory_bytes=4 * PINNED_BYTES,
            )
        ),
    )
    yield (
        "segments-dw-none",
        Case(
            segmented(
                Segment(1, 1, 3, SEQUENCE), Segment(2, 3, 1), Segment(4, 4, 2), dw_policy=DwPolicy.NONE, dw_window=0
            )
        ),
    )
    yield "segments-priority", Case(segmented(Segment(1, 2, 2), Segment(3, None, 1)), has_priority=True)


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
