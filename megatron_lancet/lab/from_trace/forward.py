"""Cuts a forward pass into the ops of its layers, by the sequence of what runs.

A layer with experts has one router, one exchange of token counts, one or two all-to-alls that dispatch (rows, and
their probabilities) and one that combines. What is between these has a name for each place. Layers without experts are
found by the core of their attention and by the norms around it.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from megatron_lancet.lab.from_trace.events import Event
from megatron_lancet.lab.from_trace.lacks import TraceLacks
from megatron_lancet.lab.from_trace.leaves import Leaves
from megatron_lancet.lab.from_trace.marks import Mark
from megatron_lancet.lab.from_trace.passes import ALL_TO_ALL, LINEAR, NORM, ROUTER, MicroBatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.timeline import Lane

_GATHERS = frozenset({"c10d::_allgather_base_", "c10d::allgather_"})
_MESSAGE_FUNCTION = "_AllToAll"
TOPK = "aten::topk"
CORE = re.compile(
    r"(?i)bmm|scaled_dot_product|flash|fused_?attn|dotproductattention|attnfuncwithcp|masked_fill|copyslices"
)
_LOSS = re.compile(r"(?i)cross_?entropy|nll_loss")
_PLAIN_LINEARS = frozenset({"aten::linear", "aten::matmul", "aten::mm"})
_MAX_DISPATCHES = 2


class Call(NamedTuple):
    """A collective: ``outer`` waits for it, ``launch`` hands it to the backend."""

    outer: Event
    launch: Event


class MoeCalls(NamedTuple):
    """The places by which a layer with experts is recognised."""

    router: Event
    counts: Call
    dispatches: Sequence[Call]
    combine: Call


class Weight(NamedTuple):
    """A linear layer's weight: name inside its layer (0 outside the layers), and the op that multiplies with it."""

    layer: int
    name: str
    event: Event


@dataclass
class Forward:
    """A forward pass.

    Attributes:
        marks: ends of ops and of waits.
        layer_kinds: of all layers.
        calls: of the layers with experts, by number.
        messages: collectives of rows by name, in order.
        weights: linear layers, by sequence number.
        head_sequence: autograd's sequence number of the loss; nodes above it are no op's.
    """

    marks: list[Mark] = field(default_factory=list)
    layer_kinds: list[LayerKind] = field(default_factory=list)
    calls: dict[int, MoeCalls] = field(default_factory=dict)
    messages: list[tuple[str, Call]] = field(default_factory=list)
    weights: dict[int, Weight] = field(default_factory=dict)
    head_sequence: int | None = None
    _places: dict[int, float] = field(default_factory=dict)

    def op_of(self, sequence: int) -> str:
        """Name of the forward op, or message, in which the node with a sequence number was made; empty for none."""
        place = self._places.get(sequence)
        if place is None:
            return ""
        index = bisect_right(self.marks, place, key=lambda mark: mark.end_us)
        return self.marks[index].name if index < len(self.marks) else ""

    def remember(self, events: Sequence[Event]) -> None:
        """Notes where the node of each sequence number was made: by the last op that was called with that number."""
        for event in events:
            if event.sequence is not None:
                # In its middle: an op begins before, and ends behind, the marks of what it contains.
                self._places[event.sequence] = (event.start_us + event.end_us) / 2
        for _, call in self.messages:
            if call.outer.sequence is not None:
                self._places[call.outer.sequence] = (call.launch.start_us + call.outer.end_us) / 2


def read_forward(path: str, batch: MicroBatch, first_layer: int = 1) -> Forward:
    """Cuts the forward pass of a micro-batch.

    Args:
        path: of the trace, for messages.
        first_layer: number of the first layer that the pass goes through, from 1.

    Raises:
        TraceLacks: an op is not there by which the others are found.
    """
    return _Reader(path, batch, first_layer).read()


def no_all_to_all(path: str) -> TraceLacks:
    """The refusal of a run in which no rows are sent."""
    return TraceLacks(
        path,
        f"no all-to-all ({ALL_TO_ALL})",
        "Record a run with --expert-model-parallel-size of 2 or more and --moe-token-dispatcher-type alltoall",
    )


class _Reader:
    """Reads one pass from its begin to its end."""

    def __init__(self, path: str, batch: MicroBatch, first_layer: int) -> None:
        self._path = path
        self._batch = batch
        self._first_layer = first_layer
        self._ops = batch.forward
        self._begin_us = batch.begin_us
        self._end_us = batch.end_forward_us
        self._leaves = Leaves(self._ops)
        self._forward = Forward()
        self._norms = [op for op in self._ops if NORM.search(op.name)]

    def read(self) -> Forward:
        layers = self._moe_calls()
        if not self._norms:
            raise TraceLacks(self._path, "no norm (aten::layer_norm, aten::rms_norm or Transformer Engine's)")
        if self._batch.has_embedding:
            self._mark(self._norms[0].start_us, Op.beside_layers(Phase.FORWARD, OpKind.EMBEDDING))
        region_us = self._begin_us
        for calls in layers:
            self._layers_up_to(region_us, calls)
            self._experts(calls)
            region_us = calls.combine.outer.end_us
            self._mark(self._end_of_layer(region_us), _op(self._number, OpKind.POSTPROCESS))
        self._layers_up_to(region_us, None)
        self._head()
        self._forward.remember(self._ops)
        self._name_weights()
        return self._forward

    @property
    def _number(self) -> int:
        """Number of the last layer so far."""
        return self._first_layer - 1 + len(self._forward.layer_kinds)

    def _mark(self, end_us: float, op: Op | str, lane: Lane = Lane.COMPUTE) -> None:
        marks = self._forward.marks
        start_us = marks[-1].end_us if marks else self._begin_us
        end_us = max(start_us, end_us)
        scaled_us, core_us = self._leaves.within(start_us, end_us) if lane is Lane.COMPUTE else (0.0, 0.0)
        marks.append(Mark(end_us, str(op), lane, scaled_us=scaled_us, core_us=core_us))

    def _moe_calls(self) -> list[MoeCalls]:
        """The routers of the pass, each with the collectives that follow it."""
        all_to_alls = list(self._calls({ALL_TO_ALL}))
        if not all_to_alls:
            if self._batch.is_staged:  # layers of this stage may have no experts
                return []
            raise no_all_to_all(self._path)
        gathers = list(self._calls(_GATHERS))
        found = []
        routers = self._routers(all_to_alls)
        for router, after in pairwise([*routers, None]):
            assert router is not None
            until_us = self._end_us if after is None else after.start_us
            own = [call for call in all_to_alls if router.end_us <= call.launch.start_us < until_us]
            if not 2 <= len(own) <= 1 + _MAX_DISPATCHES:
                raise TraceLacks(
                    self._path,
                    f"{len(own)} all-to-alls behind a router, where two or three are expected",
                    "Record with --moe-token-dispatcher-type alltoall, without --moe-shared-expert-overlap and CUDA "
                    "graphs",
                )
            *dispatches, combine = own
            counts = [call for call in gathers if router.end_us <= call.launch.start_us < dispatches[0].launch.start_us]
            if not counts:
                raise TraceLacks(
                    self._path,
                    "no exchange of token counts between a router and its dispatch",
                    "Record without --moe-pad-expert-input-to-capacity",
                )
            found.append(MoeCalls(router, counts[0], dispatches, combine))
        return found

    def _routers(self, all_to_alls: Sequence[Call]) -> list[Event]:
        named = [op for op in self._ops if op.name == ROUTER]
        if named:
            return named
        found: list[Event] = []
        linear: Event | None = None
        for op in self._ops:
            if op.name in _PLAIN_LINEARS:
                linear = op
            is_next = not found or any(found[-1].start_us < call.launch.start_us < op.start_us for call in all_to_alls)
            if op.name == TOPK and linear is not None and is_next:
                found.append(linear)
        if not found:
            raise TraceLacks(
                self._path,
                f"no router ({ROUTER}, or {TOPK} behind a linear layer)",
                "Record without --moe-router-fusion and CUDA graphs",
            )
        return found

    def _calls(self, names: set[str] | frozenset[str]) -> Iterator[Call]:
        for op in self._ops:
            if CORE.search(op.name):  # context parallelism inside attention
                continue
            for one in op.walk():
                if one.name in names:
                    functions = [into for into in op.walk() if into.name == _MESSAGE_FUNCTION]
                    around = [into for into in functions if into.start_us <= one.start_us < into.end_us]
                    yield Call(around[0] if around else op, one)

    def _norm_behind(self, time_us: float) -> Event:
        """The first norm behind a point in time."""
        index = bisect_left(self._norms, time_us, key=lambda norm: norm.start_us)
        if index == len(self._norms):
            raise TraceLacks(self._path, "no norm behind a layer", "Record a GPT with norms before attention and MLP")
        return self._norms[index]

    def _end_of_layer(self, time_us: float) -> float:
        """Start of the first norm behind a point in time, or the end of a stage that has none behind its layers."""
        if self._batch.is_staged and self._norms[-1].start_us < time_us:
            return self._end_us
        return self._norm_behind(time_us).start_us

    def _layers_up_to(self, begin_us: float, calls: MoeCalls | None) -> None:
        """Layers without experts, and the attention of the layer with experts behind them."""
        end_us = self._end_us if calls is None else calls.router.start_us
        cores = self._cores(begin_us, end_us)
        if calls is not None and not cores:
            raise TraceLacks(
                self._path,
                "no attention in front of a router",
                "Record a GPT whose layers have attention: hybrid models are not read",
            )
        for index, core_end_us in enumerate(cores):
            norm = self._norm_behind(core_end_us)
            kinds = self._forward.layer_kinds
            number = self._number + 1
            if calls is not None and index == len(cores) - 1:
                kinds.append(LayerKind.MOE)
                self._attention_of_experts(number, norm, calls)
                return
            kinds.append(LayerKind.DENSE)
            self._mark(norm.start_us, _op(number, OpKind.ATTENTION))
            self._mark(self._end_of_layer(norm.end_us), _op(number, OpKind.MLP))

    def _cores(self, begin_us: float, end_us: float) -> list[float]:
        """End of each attention's core: ops that multiply queries, keys and values, without a linear layer between."""
        found: list[float] = []
        is_inside = False
        for op in self._ops:
            if not begin_us <= op.start_us < end_us:
                continue
            if CORE.search(op.name):
                found[-1 if is_inside else len(found) :] = [op.end_us]
                is_inside = True
            elif LINEAR.fullmatch(op.name):
                is_inside = False
        return found

    def _attention_of_experts(self, number: int, norm: Event, calls: MoeCalls) -> None:
        """Stock runs shared experts, where it has them, before the router."""
        shared = [
            op for op in self._ops if LINEAR.fullmatch(op.name) and norm.end_us <= op.start_us < calls.router.start_us
        ]
        self._mark(shared[0].start_us if shared else calls.router.start_us, _op(number, OpKind.ATTENTION))
        if shared:
            self._mark(calls.router.start_us, _op(number, OpKind.SHARED_EXPERTS))

    def _experts(self, calls: MoeCalls) -> None:
        """From the router to the combine."""
        number = self._number
        self._check_no_other_linears(calls)
        self._forward.calls[number] = calls
        self._mark(calls.counts.launch.start_us, _op(number, OpKind.ROUTE))
        self._mark(calls.counts.outer.end_us, _op(number, OpKind.COUNTS), Lane.WAIT)
        for call in calls.dispatches:
            self._message(call, _op(number, OpKind.PREPROCESS), _op(number, OpKind.DISPATCH))
        self._message(calls.combine, _op(number, OpKind.EXPERTS), _op(number, OpKind.COMBINE))

    def _check_no_other_linears(self, calls: MoeCalls) -> None:
        """Shared experts that run during messages have linear layers where there are no others."""
        begin_us, end_us = calls.combine.launch.start_us, self._end_of_layer(calls.combine.outer.end_us)
        for op in self._ops:
            is_before = calls.router.end_us <= op.start_us < calls.dispatches[0].launch.start_us
            if LINEAR.fullmatch(op.name) and (is_before or begin_us <= op.start_us < end_us):
                raise TraceLacks(
                    self._path,
                    f"a linear layer during an all-to-all of rows ({op.name})",
                    "Record without --moe-shared-expert-overlap and --moe-latent-size",
                )

    def _message(self, call: Call, before: Op, message: Op) -> None:
        self._mark(call.launch.start_us, before)
        self._mark(call.outer.end_us, message, Lane.WAIT)
        self._forward.messages.append((str(message), call))

    def _head(self) -> None:
        last_us = self._forward.marks[-1].end_us if self._forward.marks else self._begin_us
        if self._norms[-1].start_us < last_us:  # a stage that others follow
            self._mark(self._end_us, "")
            return
        losses = [op for op in self._ops if _LOSS.search(op.name) and op.start_us >= last_us]
        if losses:
            self._forward.head_sequence = losses[-1].sequence
        self._mark(losses[-1].end_us if losses else self._end_us, Op.beside_layers(Phase.FORWARD, OpKind.HEAD))
        self._mark(self._end_us, "")

    def _name_weights(self) -> None:
        by_op: dict[str, list[Event]] = {}
        for op in self._ops:
            if op.sequence is not None and LINEAR.fullmatch(op.name):
                by_op.setdefault(self._forward.op_of(op.sequence), []).append(op)
        for text, linears in by_op.items():
            if not text:
                continue
            of = Op.parse(text)
            for name, event in zip(_weight_names(of.kind, linears), linears, strict=True):
                assert event.sequence is not None
                self._forward.weights[event.sequence] = Weight(of.layer or 0, name, event)


def _op(layer: int, kind: OpKind) -> Op:
    return Op(layer, 0, Phase.FORWARD, kind)


def _weight_names(kind: str, linears: Sequence[Event]) -> list[str]:
    """Megatron's names of the linear layers of an op, in the order in which they run."""
    pair = ("linear_fc1", "linear_fc2")
    if kind == OpKind.ATTENTION:
        middle = [f"linear_{place}" for place in range(2, len(linears))]
        return [f"self_attention.{name}" for name in ["linear_qkv", *middle, "linear_proj"]][: len(linears)]
    if kind == OpKind.EXPERTS and len(linears) > len(pair):
        return [f"mlp.experts.local_experts.{place // 2}.{pair[place % 2]}" for place in range(len(linears))]
    inside = {OpKind.EXPERTS.value: "mlp.experts.", OpKind.SHARED_EXPERTS.value: "mlp.shared_experts."}
    if kind == OpKind.HEAD:
        return ["output_layer"] * len(linears)
    return [f"{inside.get(kind, 'mlp.')}{pair[place % 2]}" for place in range(len(linears))]
