"""The order of a layer's ops and the turns of chunks: one table, which the model runs and the simulator puts costs on.

A layer is a tuple of verbs. Chunks take turns: a chunk's turn lasts until it needs a message that it has launched;
then the next chunk continues.

    chunk 0   attention … shared_experts                                  │ wait dispatch, experts … │
    chunk 1                                │ attention … shared_experts │                            │ wait dispatch …

Every chunk has the same number of turns, so this is the order of the collectives on every rank, whatever the tokens do;
and the last chunk reaches every router last.

:func:`program` makes the flat list of instructions of a segment. ``model/transformer_block.py`` runs them one after the
other, and ``planning/simulation/lowering.py`` adds what each costs, so what runs is what was planned. The backward has
no plan of its own: autograd runs nodes in the reverse order of their creation, which is the same list reversed, with
each verb :data:`mirrored <MIRRORED>`.

Another order of ops is a change of this file, or of the dispatch that has it (``schedule/dispatch.py``). A new op also
needs what it computes (``model/transformer_layer.py``, ``model/moe_layer.py``) and what it costs
(``planning/dispatch.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megatron_lancet import registry
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import (
    AddResidual,
    Compute,
    Launch,
    LaunchCounts,
    Layer,
    Op,
    OpKind,
    Phase,
    Verb,
    Wait,
)
from megatron_lancet.schedule.plan import OverlapRange

EXPERTS_LAYER: Layer = (
    Compute(OpKind.ROUTE),
    LaunchCounts(OpKind.COUNTS),
    Compute(OpKind.PREPROCESS),
    Launch(OpKind.DISPATCH),
    Compute(OpKind.SHARED_EXPERTS),
    Wait(OpKind.DISPATCH),
    Compute(OpKind.EXPERTS),
    Launch(OpKind.COMBINE),
    Wait(OpKind.COMBINE),
    Compute(OpKind.POSTPROCESS),
    AddResidual(OpKind.POSTPROCESS),
)

MTP_PROJECTION = Compute(OpKind.MTP_PROJECTION)
"""Needs the next tokens' embeddings, so the micro-batch is not cut here."""
VERBS: dict[LayerKind, Layer] = {
    LayerKind.MOE: (Compute(OpKind.ATTENTION), *EXPERTS_LAYER),
    LayerKind.DENSE: (Compute(OpKind.ATTENTION), Compute(OpKind.MLP)),
    LayerKind.ATTENTION_ONLY: (Compute(OpKind.ATTENTION),),
    LayerKind.MOE_ONLY: (Compute(OpKind.NORM), *EXPERTS_LAYER),
    LayerKind.MLP_ONLY: (Compute(OpKind.MLP),),
}

MIRRORED: dict[type[Verb], type[Verb]] = {Compute: Compute, Launch: Wait, Wait: Launch}
"""The verb in the backward pass: the gradient's message is launched where the rows were waited for, and waited for
where they were launched. Counts are not exchanged again."""


_NEIGHBOURS = [pair for form in Dispatch.known().values() for pair in pairwise(form.order(EXPERTS_LAYER))]
ROWS_MADE_BY = {after.kind: before.kind for before, after in _NEIGHBOURS if isinstance(after, Launch)}
"""The op that makes the rows of a message. Launching the message is a part of it."""

ROWS_NEEDED_BY = {before.kind: after.kind for before, after in _NEIGHBOURS if isinstance(before, Wait)}
"""The op that needs the rows of a message. In the backward it makes their gradients."""

_FIRST_IN_CHUNKS = {
    OverlapRange.GATE: Compute(OpKind.ROUTE),
    OverlapRange.EXPERTS: LaunchCounts(OpKind.COUNTS),
}
_LAST_IN_CHUNKS = Compute(OpKind.POSTPROCESS)
"""Last verb in chunks of the ranges without attention, in which the residual is not cut either."""


class Instruction(NamedTuple):
    """A verb at its place, for example ``wait L3.c0.F.dispatch``.

    Attributes:
        layer: Megatron's global layer number, from 1.
        chunk: index of the chunk; 0 where the micro-batch is not cut.
        phase: forward or input gradient. Programs of segments are forward.
    """

    verb: Verb
    layer: int
    chunk: int
    phase: Phase = Phase.FORWARD

    @property
    def op(self) -> Op:
        """The op that it belongs to."""
        return Op(self.layer, self.chunk, self.phase, self.verb.kind, self.verb.tile)

    def __str__(self) -> str:
        return f"{self.verb.prefix}{self.op}"


@dataclass(frozen=True)
class Cut:
    """Split the micro-batch into chunks: from here on every instruction is for one of them."""

    def __str__(self) -> str:
        return str(OpKind.CUT)


@dataclass(frozen=True)
class Concatenate:
    """Concatenate the chunks: from here on instructions are for the full micro-batch."""

    def __str__(self) -> str:
        return "concatenate"


Program = list[Instruction | Cut | Concatenate]


def verbs_of(
    kind: LayerKind,
    has_shared_experts: bool,
    pads_to_capacity: bool = False,
    num_chunks: int = 1,
    dispatch: Dispatch = PLAIN,
) -> Layer:
    """The verbs of a chunk in a layer of a kind, in order.

    Args:
        has_shared_experts: whether the model's MoE layers have experts that see all tokens.
        pads_to_capacity: whether routers give every expert equally many rows of a micro-batch. Then the numbers of rows
            are known without token counts, but not a chunk's splits, which has any part of an expert's rows.
        num_chunks: number of chunks of a micro-batch.
        dispatch: what all-to-alls carry, and in how many tiles.
    """
    left_out = set() if has_shared_experts else {OpKind.SHARED_EXPERTS}
    if pads_to_capacity and num_chunks == 1:
        left_out.add(OpKind.COUNTS)
    return dispatch.order(tuple(verb for verb in VERBS[kind] if verb.kind not in left_out))


def mtp_layer(layer: Layer) -> Layer:
    """The verbs of a multi-token prediction: its transformer layer's, after the projection of the micro-batch."""
    return (MTP_PROJECTION, *layer)


def program(
    layers: Sequence[tuple[int, Layer]], num_chunks: int, overlap_range: OverlapRange, wiring: str = ""
) -> Program:
    """Returns what runs in a segment's layers, forward, in order.

    Args:
        layers: global number and verbs of each.
        num_chunks: number of chunks of a micro-batch.
        overlap_range: the part of the layers that runs in chunks.
        wiring: name in the registry of what brings the verbs of all layers into another order, in pieces with the
            number of their layer; empty for one layer after the other.
    """
    layers = registry.by_name(wiring)(layers) if wiring else layers
    if num_chunks == 1:
        return [instruction for number, layer in layers for instruction in _placed(layer, number, 0)]
    instructions: Program = []
    for stack in _stacks(layers, overlap_range):
        parts = [(number, *split_layer(layer, overlap_range)) for number, layer in stack]
        (first, before, _, _), (last, _, _, behind) = parts[0], parts[-1]
        in_chunks = [(number, inside) for number, _, inside, _ in parts if inside]
        instructions += _placed(before, first, 0)
        if in_chunks:
            instructions += _in_chunks(in_chunks, num_chunks)
        instructions += _placed(behind, last, 0)
    return instructions


def _stacks(layers: Sequence[tuple[int, Layer]], overlap_range: OverlapRange) -> list[list[tuple[int, Layer]]]:
    """Layers without a concatenation between them: single ones, or in the range stack all up to the next projection."""
    stacks: list[list[tuple[int, Layer]]] = []
    for number, layer in layers:
        if not stacks or overlap_range is not OverlapRange.STACK or layer[0] == MTP_PROJECTION:
            stacks.append([])
        stacks[-1].append((number, layer))
    return stacks


def split_layer(layer: Layer, overlap_range: OverlapRange) -> tuple[Layer, Layer, Layer]:
    """Splits a layer into what runs on the full micro-batch, then in chunks, then on the full micro-batch again."""
    if overlap_range.has_attention:
        num_whole = layer.count(MTP_PROJECTION)
        return layer[:num_whole], layer[num_whole:], ()
    if _FIRST_IN_CHUNKS[overlap_range] not in layer:
        return layer, (), ()
    first, end = layer.index(_FIRST_IN_CHUNKS[overlap_range]), layer.index(_LAST_IN_CHUNKS) + 1
    return layer[:first], layer[first:end], layer[end:]


def _in_chunks(layers: Sequence[tuple[int, Layer]], num_chunks: int) -> Program:
    """The program of layers in chunks that take turns."""
    turns_of_chunks = [
        _turns([instruction for number, layer in layers for instruction in _placed(layer, number, chunk)])
        for chunk in range(num_chunks)
    ]
    taken = [instruction for turn in zip(*turns_of_chunks, strict=True) for part in turn for instruction in part]
    return [Cut(), *taken, Concatenate()]


def _turns(instructions: Sequence[Instruction]) -> list[Sequence[Instruction]]:
    """One chunk's instructions, split before each wait at which a turn ends."""
    verbs = enumerate(instruction.verb for instruction in instructions)
    waits = (index for index, verb in verbs if isinstance(verb, Wait) and verb.ends_turn)
    return [instructions[start:end] for start, end in pairwise([0, *waits, len(instructions)])]


def _placed(verbs: Layer, layer: int, chunk: int) -> list[Instruction]:
    return [Instruction(verb, layer, chunk) for verb in verbs]
