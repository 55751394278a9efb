"""Cuts a backward pass into ops: a node of autograd belongs to the forward op that has its sequence number.

Everything between the ends of two nodes belongs to the later one. A linear layer's node computes dX first and dW after
it; the accumulation of the gradient, and what DDP does then, follow it and belong to dW.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_lancet.lab.from_trace.events import Event
from megatron_lancet.lab.from_trace.forward import Forward, Weight
from megatron_lancet.lab.from_trace.lacks import TraceLacks
from megatron_lancet.lab.from_trace.leaves import Leaves
from megatron_lancet.lab.from_trace.marks import Mark
from megatron_lancet.lab.from_trace.passes import ALL_TO_ALL, NODE, MicroBatch
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.timeline import Lane
from megatron_lancet.schedule.turns import ROWS_NEEDED_BY

_ACCUMULATES = NODE + "torch::autograd::AccumulateGrad"
_COLLECTIVE = "c10d::"
_PRODUCTS = frozenset({"aten::matmul", "aten::mm", "aten::addmm"})
_GRADIENT_BYTES = 4
"""Of an element: Megatron accumulates gradients in fp32."""


@dataclass(frozen=True)
class DwSizes:
    """Sizes of a weight gradient; see :class:`~megatron_lancet.planning.measured.op_times.WeightGradSizes`."""

    pinned_bytes: tuple[int, ...]
    weight_bytes: int


@dataclass
class Backward:
    """A backward pass.

    Attributes:
        marks: ends of ops, weight gradients and waits, behind the marks of the forward pass.
        messages: all-to-alls by name, in order: launch, and end of the wait in us.
        weight_grads: sizes, by name.
    """

    marks: list[Mark] = field(default_factory=list)
    messages: list[tuple[str, Event, float]] = field(default_factory=list)
    weight_grads: dict[str, DwSizes] = field(default_factory=dict)


def read_backward(path: str, batch: MicroBatch, forward: Forward) -> Backward:
    """Cuts the backward pass of a micro-batch.

    Raises:
        TraceLacks: its nodes can't be related to the forward pass.
    """
    reader = _Reader(batch, forward)
    for node in batch.nodes:
        reader.add(node)
    if reader.num_known == 0:
        raise TraceLacks(path, "no sequence numbers of autograd that relate the backward pass to the forward pass")
    return reader.backward


class _Reader:
    """Adds node after node.

    Attributes:
        num_known: nodes whose forward op is known.
    """

    def __init__(self, batch: MicroBatch, forward: Forward) -> None:
        self._forward = forward
        self._leaves = Leaves(batch.nodes)
        self._begin_us = batch.begin_backward_us
        self._last = ""
        self._accumulated = ""
        self.backward = Backward()
        self.num_known = 0

    def add(self, node: Event) -> None:
        """The next node."""
        sequence = node.sequence
        marks = self.backward.marks
        if node.name == _ACCUMULATES or sequence is None:
            if marks and _is_weight_grad(marks[-1]):
                marks[-1] = marks[-1]._replace(end_us=node.end_us)
            else:
                self._mark(node.end_us, self._accumulated or self._last)
            return
        self._accumulated = ""
        head = self._forward.head_sequence
        if head is not None and sequence > head:  # what is made of the loss: outside the model
            self._mark(node.end_us, "")
            return
        name = self._forward.op_of(sequence)
        if name:
            self.num_known += 1
            op = Op.parse(name).mirrored()
            if isinstance(op.kind, OpKind) and op.kind.is_message:
                self._message(node, op)
                return
            self._last = str(op)
        weight = self._forward.weights.get(sequence)
        if weight is not None:
            self._linear(node, weight)
        else:
            self._mark(node.end_us, self._last)

    def _mark(self, end_us: float, name: str, lane: Lane = Lane.COMPUTE, weight_grad: str = "") -> None:
        marks = self.backward.marks
        start_us = marks[-1].end_us if marks else self._begin_us
        end_us = max(start_us, end_us)
        scaled_us, core_us = self._leaves.within(start_us, end_us) if lane is Lane.COMPUTE else (0.0, 0.0)
        marks.append(Mark(end_us, name, lane, weight_grad, scaled_us, core_us))

    def _message(self, node: Event, op: Op) -> None:
        assert isinstance(op.kind, OpKind)
        launches = [one for one in node.walk() if one.name == ALL_TO_ALL]
        if not launches:  # token counts have no gradient
            self._mark(node.end_us, self._last)
            return
        if op.kind in ROWS_NEEDED_BY:
            self._last = str(op.with_kind(ROWS_NEEDED_BY[op.kind]))
        self._mark(launches[0].start_us, self._last)
        self._mark(node.end_us, str(op), Lane.WAIT)
        self.backward.messages.append((str(op), launches[0], node.end_us))

    def _linear(self, node: Event, weight: Weight) -> None:
        name = str(Op.weight_grad(weight.layer or None, weight.name))
        sizes = _sizes(node, weight)
        before = self.backward.weight_grads.get(name)
        pinned = sizes.pinned_bytes if before is None else before.pinned_bytes + sizes.pinned_bytes
        self.backward.weight_grads[name] = DwSizes(pinned, sizes.weight_bytes)
        products = list(_outermost_products(node))
        if len(products) < 2:  # the kernels of dX and dW belong to one op of the host
            self._mark(node.end_us, self._last, weight_grad=name)
            return
        self._mark(products[0].end_us, self._last)
        if not any(one.name.startswith(_COLLECTIVE) for one in node.walk()):
            self._mark(node.end_us, name)
            return
        # The tensor-parallel ranks' sum of dX is under way next to dW; what is waited for it then is not dW's.
        self._mark(products[-1].end_us, name)
        self._mark(node.end_us, self._last)
        self._accumulated = name


def _is_weight_grad(mark: Mark) -> bool:
    op = Op.find(mark.name)
    return bool(mark.weight_grad) or (op is not None and op.phase is Phase.WEIGHT_GRAD)


def _outermost_products(node: Event) -> Iterator[Event]:
    for child in node.children:
        if child.name in _PRODUCTS:
            yield child
        else:
            yield from _outermost_products(child)


def _sizes(node: Event, weight: Weight) -> DwSizes:
    """Sizes from the shapes of the forward op's input and weight and of the gradient."""
    input_bytes = _num_elements(weight.event.dims, 0) * weight.event.element_bytes(0)
    gradient = next((child for child in node.children if child.dims), node)
    gradient_bytes = _num_elements(gradient.dims, 0) * gradient.element_bytes(0)
    weight_bytes = _num_elements(weight.event.dims, 1) * _GRADIENT_BYTES
    return DwSizes((input_bytes + gradient_bytes,), weight_bytes)


def _num_elements(dims: list[object], place: int) -> int:
    sizes = dims[place] if place < len(dims) else None
    if not isinstance(sizes, list) or not sizes or not all(isinstance(size, int) for size in sizes):
        return 0
    number = 1
    for size in sizes:
        number *= int(size)
    return number
