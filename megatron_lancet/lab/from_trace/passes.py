"""The forward and backward passes of the micro-batches in a step, by what begins and runs them.

Point-to-point messages of the pipeline, and the change from a forward to a backward pass, end a pass. A backward pass
belongs to the forward pass in which its sequence numbers were given, so passes may lie in any order, as with
pipeline stages do.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_lancet.lab.from_trace.events import Event, RankEvents
from megatron_lancet.lab.from_trace.lacks import TraceLacks

NODE = "autograd::engine::evaluate_function: "
"""Start of the name of a node's run in a backward pass."""
EMBEDDING = "aten::embedding"
ROUTER = "RouterGatingLinearFunction"
NORM = re.compile(r"(?i)(layer|rms)_?norm|_OperationFuser")
LINEAR = re.compile(r"LinearWithGradAccumulationAndAsyncCommunication|_Linear|_LayerNormLinear|_GroupedLinear")
_CHECKPOINT = "CheckpointFunction"
ALL_TO_ALL = "c10d::alltoall_base_"
_POINT_TO_POINT = frozenset({"c10d::send", "c10d::recv_", "c10d::recv_any_source_"})
_STAGES = "PIPELINE_MODEL_PARALLEL"


@dataclass(frozen=True)
class MicroBatch:
    """Both passes of a micro-batch through one part of the layers.

    Attributes:
        begin_us: start of the forward pass.
        end_forward_us: end of that.
        forward: its ops, recomputed parts as if they stood by themselves.
        nodes: runs of autograd's nodes in the backward pass.
        part: which of the rank's parts of the layers, from 0: a rank has several if pipeline stages interleave.
        has_embedding: whether its first op is the embedding.
        is_staged: whether there are other stages, which have the other layers.
    """

    begin_us: float
    end_forward_us: float
    forward: Sequence[Event]
    nodes: Sequence[Event]
    part: int = 0
    has_embedding: bool = True
    is_staged: bool = False

    @property
    def begin_backward_us(self) -> float:
        """Start of the backward pass."""
        return self.nodes[0].start_us


@dataclass
class _Pass:
    """Ops of one pass; of a backward pass the runs of its nodes."""

    is_backward: bool
    ops: list[Event] = field(default_factory=list)


def stage_of(rank: RankEvents) -> int:
    """Pipeline stage of a rank, from 0."""
    stages = rank.groups.get(_STAGES, (rank.rank,))
    return stages.index(rank.rank)


def num_stages_of(rank: RankEvents) -> int:
    """Number of the run's pipeline stages."""
    return rank.group_size(_STAGES)


def micro_batches(rank: RankEvents, step: tuple[float, float], num_parts: int | None = 1) -> list[MicroBatch]:
    """Returns the micro-batches of one step, in the order of their forward passes.

    Args:
        num_parts: parts of the layers that the rank has; None if it is the first stage, which its embeddings show.

    Raises:
        TraceLacks: a pass is not there, or something that runs in it is not supported.
    """
    forwards, backwards = [], []
    for one in _passes(rank, step):
        if one.is_backward:
            backwards.append(one.ops)
        elif (ops := _from_the_model_on(one.ops)) is not None:
            forwards.append(ops)
    if not backwards:
        raise TraceLacks(rank.path, "a step without a backward pass")
    is_staged = num_stages_of(rank) > 1
    if not forwards or (stage_of(rank) == 0 and not any(ops[0].name == EMBEDDING for ops in forwards)):
        raise TraceLacks(
            rank.path,
            f"a step without {EMBEDDING}, with which a forward pass begins",
            "Record ranks from the first pipeline stage on, with steps of training",
        )
    _check_no_more_predictions(rank, forwards)
    nodes_of = _nodes_of_forwards(rank.path, forwards, backwards)
    if num_parts is None:
        num_parts = max(1, len(forwards) // sum(ops[0].name == EMBEDDING for ops in forwards))
    parts = _parts(rank, forwards, num_parts)
    return [
        MicroBatch(
            begin_us=ops[0].start_us,
            end_forward_us=nodes[0].start_us if not is_staged else max(op.end_us for op in ops),
            forward=ops,
            nodes=nodes,
            part=part,
            has_embedding=ops[0].name == EMBEDDING,
            is_staged=is_staged,
        )
        for ops, nodes, part in zip(forwards, nodes_of, parts, strict=True)
    ]


def _passes(rank: RankEvents, step: tuple[float, float]) -> list[_Pass]:
    """The step's ops by pass; what runs before, between and behind passes is in one with others, or in none."""
    begin_us, end_us = step
    ops = [op for op in rank.main if begin_us <= op.start_us < end_us]
    others = [op for op in rank.others if begin_us <= op.start_us < end_us and op.name.startswith(NODE)]
    if any(op.name == _CHECKPOINT and _has_all_to_all(op) for op in ops):
        raise TraceLacks(rank.path, "fully recomputed layers", "Record a run without --recompute-granularity full")
    found: list[_Pass] = []
    current: _Pass | None = None
    for op in sorted([*_flat(ops), *others], key=lambda one: one.start_us):
        if op.name in _POINT_TO_POINT:
            current = None
            continue
        is_node = op.name.startswith(NODE)
        if current is not None and current.is_backward and not is_node and not _is_of_model(op):
            continue  # between nodes: reductions of gradients; behind them: the optimizer
        if current is None or current.is_backward != is_node:
            current = _Pass(is_node)
            found.append(current)
        current.ops.append(op)
    return found


def _is_of_model(op: Event) -> bool:
    names = (EMBEDDING, ROUTER)
    return op.name in names or NORM.search(op.name) is not None or LINEAR.fullmatch(op.name) is not None


def _from_the_model_on(ops: Sequence[Event]) -> list[Event] | None:
    """A forward pass from its embedding, or else from its first norm on; None for ops of something else.

    What comes before is the loading of data, or the wait for another pipeline stage.
    """
    first = next((place for place, op in enumerate(ops) if op.name == EMBEDDING or NORM.search(op.name)), None)
    if first is None or not any(NORM.search(op.name) for op in ops[first:]):
        return None
    return list(ops[first:])


def _check_no_more_predictions(rank: RankEvents, forwards: Sequence[Sequence[Event]]) -> None:
    """Multi-token predictions embed their tokens again, behind the layers.

    Raises:
        TraceLacks: there are some.
    """
    for ops in forwards:
        norm_us = next(op.start_us for op in ops if NORM.search(op.name))
        again = [op for op in ops if op.name == EMBEDDING and (stage_of(rank) > 0 or op.start_us > norm_us)]
        if again:
            raise TraceLacks(
                rank.path,
                f"an {EMBEDDING} behind the first layer, as multi-token predictions have",
                "Record without --mtp-num-layers, or install the package and profile with lancet plan profile",
            )


def _nodes_of_forwards(
    path: str, forwards: Sequence[Sequence[Event]], backwards: Sequence[Sequence[Event]]
) -> list[Sequence[Event]]:
    """The backward pass of each forward pass, by autograd's sequence numbers.

    Raises:
        TraceLacks: one is not there, or has another pass in its middle.
    """
    begins = [next((op.sequence for op in ops if op.sequence is not None), 0) for ops in forwards]
    found: list[Sequence[Event]] = [()] * len(forwards)
    for nodes in backwards:
        sequence = next((node.sequence for node in nodes if node.sequence is not None), None)
        place = len(forwards) - 1 if sequence is None else bisect_right(begins, sequence) - 1
        if place < 0:
            raise TraceLacks(path, "a backward pass without its forward pass", "Record full steps")
        if found[place]:
            raise TraceLacks(
                path,
                "a backward pass with a forward pass in its middle: a run that overlaps micro-batches already",
                "Record without --overlap-moe-expert-parallel-comm and --delay-wgrad-compute",
            )
        found[place] = nodes
    if not all(found):
        raise TraceLacks(path, "a forward pass without its backward pass", "Record training, not evaluation")
    return found


def _parts(rank: RankEvents, forwards: Sequence[Sequence[Event]], num_parts: int) -> list[int]:
    """The rank's part of the layers for each forward pass.

    Interleaved stages run as many micro-batches through one part as there are stages, then as many through the next.

    Raises:
        TraceLacks: the passes are in another order, or part of them was not recorded.
    """
    num_micro_batches, rest = divmod(len(forwards), num_parts)
    group = num_stages_of(rank)
    parts = [
        part
        for first in range(0, num_micro_batches, group)
        for part in range(num_parts)
        for _ in range(min(group, num_micro_batches - first))
    ]
    is_first_stage = stage_of(rank) == 0
    if rest or any(
        (ops[0].name == EMBEDDING) != (is_first_stage and part == 0) for ops, part in zip(forwards, parts, strict=True)
    ):
        raise TraceLacks(
            rank.path,
            f"{len(forwards)} forward passes through {num_parts} parts of its layers, not {group} each by turns",
            "Record full steps without --microbatch-group-size-per-virtual-pipeline-stage",
        )
    return parts


def _has_all_to_all(op: Event) -> bool:
    return any(one.name == ALL_TO_ALL for one in op.walk())


def _flat(ops: Iterable[Event]) -> Iterable[Event]:
    """The ops; in place of a recomputed part what runs in it, behind an op of its name that takes no time."""
    for op in ops:
        if op.name != _CHECKPOINT:
            yield op
            continue
        yield Event(op.name, op.start_us, op.start_us, op.thread, op.args)
        yield from _flat(op.children)
