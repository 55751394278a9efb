"""The forward and backward passes of the micro-batches in a step, by what begins and runs them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_lancet.planning.from_trace.events import Event, RankEvents
from megatron_lancet.planning.from_trace.lacks import TraceLacks

NODE = "autograd::engine::evaluate_function: "
"""Begin of the name of a node's run in a backward pass."""
EMBEDDING = "aten::embedding"
_CHECKPOINT = "CheckpointFunction"
_ALL_TO_ALL = "c10d::alltoall_base_"


@dataclass(frozen=True)
class MicroBatch:
    """Both passes of a micro-batch.

    Attributes:
        begin_us: begin of the forward pass.
        forward: its ops, recomputed parts as if they stood by themselves.
        nodes: runs of autograd's nodes in the backward pass.
    """

    begin_us: float
    forward: Sequence[Event]
    nodes: Sequence[Event]

    @property
    def begin_backward_us(self) -> float:
        """Begin of the backward pass."""
        return self.nodes[0].start_us


def micro_batches(rank: RankEvents, step: tuple[float, float]) -> list[MicroBatch]:
    """Returns the micro-batches of one step, in order.

    Raises:
        TraceLacks: a pass is not there, or something that runs in it is not supported.
    """
    begin_us, end_us = step
    ops = [op for op in rank.main if begin_us <= op.start_us < end_us]
    others = [op for op in rank.others if begin_us <= op.start_us < end_us]
    nodes = sorted((op for op in [*ops, *others] if op.name.startswith(NODE)), key=lambda op: op.start_us)
    if not nodes:
        raise TraceLacks(rank.path, "a step without a backward pass")
    ops = [op for op in ops if not op.name.startswith(NODE)]
    if any(op.name == _CHECKPOINT and _has_all_to_all(op) for op in ops):
        raise TraceLacks(
            rank.path, "layers that are recomputed as a whole", "Record a run without --recompute-granularity full"
        )
    flat = list(_flat(ops))
    begins: list[float] = []
    for op in flat:
        begun = bool(begins) and not any(begins[-1] <= node.start_us < op.start_us for node in nodes)
        if op.name == EMBEDDING and not begun:
            begins.append(op.start_us)
    if not begins:
        raise TraceLacks(
            rank.path,
            f"a step without {EMBEDDING}, with which a forward pass begins",
            "Record rank 0 of a run without pipeline parallelism",
        )
    found = []
    for start_us, next_us in zip(begins, [*begins[1:], end_us], strict=True):
        own = [node for node in nodes if start_us <= node.start_us < next_us]
        if not own:
            raise TraceLacks(rank.path, "a forward pass without its backward pass", "Record training, not evaluation")
        forward = [op for op in flat if start_us <= op.start_us < own[0].start_us]
        found.append(MicroBatch(start_us, forward, own))
    return found


def _has_all_to_all(op: Event) -> bool:
    return any(one.name == _ALL_TO_ALL for one in op.walk())


def _flat(ops: Iterable[Event]) -> Iterable[Event]:
    """The ops; in place of a recomputed part what runs in it, behind an op of its name that takes no time."""
    for op in ops:
        if op.name != _CHECKPOINT:
            yield op
            continue
        yield Event(op.name, op.start_us, op.start_us, op.thread, op.args)
        yield from _flat(op.children)
