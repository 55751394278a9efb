"""Deferred weight gradients of a traced step, which a replay may run in other waits than the step did.

Where the host sees whether a message has arrived, a rank runs weight gradients (dW) in front of a wait as long as the
message is in flight, the oldest first, and those whose window of all-to-alls is over behind the wait
(``runtime/weight_grad_store.py``). So it depends on all ranks which of them run where, and with another cause of waits
gone they run elsewhere.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron_lancet.lab.causes.program import Code, Item
from megatron_lancet.schedule.ops import Op, OpKind, Phase

_PUT_BY = {
    "self_attention": OpKind.ATTENTION,
    OpKind.EXPERTS.value: OpKind.EXPERTS,
    OpKind.SHARED_EXPERTS.value: OpKind.SHARED_EXPERTS,
    "output_layer": OpKind.HEAD,
}
"""Ops in whose backward a dW is put, by a part of the weight's name; others belong to an MLP."""


class WeightGrad(NamedTuple):
    """A dW that may run in several waits.

    Attributes:
        after: index of the item from which on it can run.
        before: index of the item in front of which it has run.
        last_wait: number of waits of backwards behind which it runs, if it has not run.
    """

    item: Item
    after: int
    before: int
    last_wait: int


class Deferred(NamedTuple):
    """A rank's items without deferred dWs, and these in their order."""

    items: tuple[Item, ...]
    weight_grads: tuple[WeightGrad, ...] = ()


def without_weight_grads(items: Sequence[Item]) -> Deferred:
    """Takes the dWs out of a rank's items, if they can be placed anew.

    They stay where they were in paired steps, and where it is not known which op has put them.
    """
    others = [item for item in items if item.code is not Code.WEIGHT_GRAD]
    if len(others) == len(items) or _is_paired(others):
        return Deferred(tuple(items))
    num_waits = _num_waits(others)
    puts = _puts(others)
    begins = [index for index, item in enumerate(others) if _phase(item) is Phase.FORWARD]
    ran = dict[str, int]()
    found: list[tuple[Item, int, int]] = []
    position = 0
    for item in items:
        if item.code is not Code.WEIGHT_GRAD:
            position += 1
            continue
        number = ran.get(item.name, 0)
        ran[item.name] = number + 1
        put_by = puts.get(_put_by(item.name), [])
        if number >= len(put_by) or put_by[number] > position:
            return Deferred(tuple(items))
        found.append((item, put_by[number], position))
    window = max(_waits_passed(others, num_waits, after, position) for _, after, position in found)
    weight_grads = []
    for item, after, _ in found:
        following = bisect_left(begins, after)
        before = begins[following] if following < len(begins) else len(others)
        weight_grads.append(WeightGrad(item, after, before, num_waits[after] + window))
    return Deferred(tuple(others), tuple(weight_grads))


def _waits_passed(items: Sequence[Item], num_waits: Sequence[int], after: int, position: int) -> int:
    """Waits of backwards that a dW is known to may be deferred by: those that it was, and the one that it ran in."""
    ran_in_wait = position < len(items) and is_backward_wait(items[position])
    return max(1, num_waits[position] - num_waits[after] + ran_in_wait)


def _phase(item: Item) -> Phase | None:
    op = Op.find(item.key[0])
    return None if op is None else op.phase


def _is_paired(items: Sequence[Item]) -> bool:
    """Whether forwards and backwards take turns inside of micro-batches."""
    phases = [phase for item in items if item.code is Code.WORK and (phase := _phase(item)) is not None]
    num_turns = sum(a is not b for a, b in pairwise(phases))
    num_micro_batches = len({item.key for item in items if item.code is Code.WORK and _is_head(item)})
    return num_turns > 2 * max(1, num_micro_batches)


def _is_head(item: Item) -> bool:
    op = Op.find(item.key[0])
    return op is not None and op.kind == OpKind.HEAD and op.phase is Phase.FORWARD


def _num_waits(items: Sequence[Item]) -> list[int]:
    """Waits of backwards in front of each item, and of the end."""
    found = [0]
    for item in items:
        found.append(found[-1] + is_backward_wait(item))
    return found


def is_backward_wait(item: Item) -> bool:
    """Whether it is a wait in which a window of deferral advances."""
    return item.code is Code.WAIT and _phase(item) is Phase.INPUT_GRAD


def _put_by(weight_grad: str) -> tuple[int | None, str]:
    """Layer and kind of the op that has put a dW."""
    op = Op.parse(weight_grad)
    parts = op.kind.split(".")
    return op.layer, next((kind for part in parts if (kind := _PUT_BY.get(part)) is not None), OpKind.MLP)


def _puts(items: Sequence[Item]) -> dict[tuple[int | None, str], list[int]]:
    """Index behind each backward op, by layer and kind, in the order of time."""
    last: dict[tuple[str, int], int] = {}
    for index, item in enumerate(items):
        if item.code is Code.WORK and _phase(item) is Phase.INPUT_GRAD:
            last[item.key] = index + 1
    found = defaultdict[tuple[int | None, str], list[int]](list)
    for (name, _), index in sorted(last.items(), key=lambda one: one[1]):
        op = Op.parse(name)
        found[op.layer, op.kind].append(index)
    return found
