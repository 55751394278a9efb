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

Another order of ops is a change of this file. A new op also needs what it computes (``model/transformer_layer.py``,
``model/moe_layer.py``) and what it costs (``planning/simulation/lowering.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, NamedTuple

from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import IN_TILES, INSIDE_NODE, Op, OpKind, Phase
from megatron_lancet.schedule.plan import Dispatch, OverlapRange, OwnRows


@dataclass(frozen=True)
class Verb:
    """What is done with an op; one subclass for each.

    Attributes:
        kind: kind of the op.
        tile: index of the part of the chunk's rows that it is for; None for all of them.
    """

    kind: OpKind
    tile: int | None = None
    prefix: ClassVar[str] = ""

    @property
    def of_all_rows(self) -> "Verb":
        """The same verb without a tile."""
        return self if self.tile is None else replace(self, tile=None)


class Compute(Verb):
    """Run the op on the computing thread."""


class LaunchCounts(Verb):
    """Launch the exchange of token counts. The dispatch waits for it, so there is no instruction that does."""

    prefix = "launch "


class Launch(Verb):
    """Launch the message with the rows that the previous op has made."""

    prefix = "launch "


class Wait(Verb):
    """Wait for the message whose rows the next op needs. A chunk's turn begins here."""

    prefix = "wait "


class AddResidual(Verb):
    """Add the residual to the layer's output, as a part of the op."""

    prefix = "add residual in "


Layer = tuple[Verb, ...]
"""What a chunk does in a layer, in order."""

_EXPERTS: Layer = (
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

_HOPS: dict[Verb, Layer] = {
    Launch(OpKind.DISPATCH): (Launch(OpKind.NODE_DISPATCH),),
    Wait(OpKind.DISPATCH): (
        Wait(OpKind.NODE_DISPATCH),
        Compute(OpKind.NODE_ROWS),
        Launch(OpKind.LOCAL_DISPATCH),
        Wait(OpKind.LOCAL_DISPATCH),
    ),
    Launch(OpKind.COMBINE): (Launch(OpKind.LOCAL_COMBINE),),
    Wait(OpKind.COMBINE): (
        Wait(OpKind.LOCAL_COMBINE),
        Compute(OpKind.NODE_SUMS),
        Launch(OpKind.NODE_COMBINE),
        Wait(OpKind.NODE_COMBINE),
    ),
}
"""The verbs of two hops that replace a verb of one hop."""

_MTP_PROJECTION = Compute(OpKind.MTP_PROJECTION)
"""Needs the next tokens' embeddings, so the micro-batch is whole here."""
_VERBS: dict[LayerKind, Layer] = {
    LayerKind.MOE: (Compute(OpKind.ATTENTION), *_EXPERTS),
    LayerKind.DENSE: (Compute(OpKind.ATTENTION), Compute(OpKind.MLP)),
    LayerKind.ATTENTION_ONLY: (Compute(OpKind.ATTENTION),),
    LayerKind.MOE_ONLY: (Compute(OpKind.NORM), *_EXPERTS),
    LayerKind.MLP_ONLY: (Compute(OpKind.MLP),),
}

MIRRORED: dict[type[Verb], type[Verb]] = {Compute: Compute, Launch: Wait, Wait: Launch}
"""The verb in the backward pass: the gradient's message is launched where the rows were waited for, and waited for
where they were launched. Counts are not exchanged again."""


def _in_two_hops(layer: Layer) -> Layer:
    return tuple(own for verb in layer for own in _HOPS.get(verb, (verb,)))


_TILED = (Wait(OpKind.DISPATCH), Compute(OpKind.EXPERTS), Launch(OpKind.COMBINE))


def _in_tiles(layer: Layer, tiles: int, own_rows: OwnRows) -> Layer:
    """What a chunk does whose rows go to other ranks in tiles: all leave at once and come back as they are done.

    The rows that stay on the rank run where it would otherwise wait: for the first tile, or for the first one back.
    """
    in_halves = own_rows is OwnRows.HALF
    own_before = [Compute(OpKind.OWN_EXPERTS, 0)] if in_halves else []
    own_after = Compute(OpKind.OWN_EXPERTS, 1 if in_halves else None)
    done: list[Verb] = []
    for verb in layer:
        if verb == _TILED[0]:
            done += own_before
            done += [replace(step, tile=tile) for tile in range(tiles) for step in _TILED]
            done.append(own_after)
        elif verb in (Launch(OpKind.DISPATCH), Wait(OpKind.COMBINE)):
            done += [replace(verb, tile=tile) for tile in range(tiles)]
        elif verb not in _TILED:
            done.append(verb)
    return tuple(done)


_NEIGHBOURS = (*pairwise(_EXPERTS), *pairwise(_in_two_hops(_EXPERTS)))
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
        chunk: index of the chunk; 0 where the micro-batch is whole.
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
    """Concatenate the chunks: from here on instructions are for the whole micro-batch."""

    def __str__(self) -> str:
        return "concatenate"


Program = list[Instruction | Cut | Concatenate]

_CUTS: dict[str, Cut | Concatenate] = {str(one): one for one in (Cut(), Concatenate())}
_ALL_LAYERS = (*_VERBS.values(), (_MTP_PROJECTION,), _in_two_hops(_EXPERTS), _in_tiles(_EXPERTS, 1, OwnRows.HALF))
_VERB_OF_TEXT = {(verb.prefix, str(verb.kind)): verb.of_all_rows for layer in _ALL_LAYERS for verb in layer}


def parse_instruction(text: str) -> Instruction:
    """Parses an instruction of a layer from the text that it prints as.

    Raises:
        ValueError: no instruction of a layer prints as ``text``.
    """
    words, space, name = text.rpartition(" ")
    op = Op.find(name)
    verb = None if op is None else _VERB_OF_TEXT.get((words + space, op.kind))
    if op is not None and verb is not None and op.layer and op.chunk is not None:
        found = Instruction(replace(verb, tile=op.tile), op.layer, op.chunk, op.phase)
        is_in_pass = op.phase is Phase.FORWARD or (op.phase is Phase.INPUT_GRAD and type(verb) in MIRRORED)
        # Op.find also reads other spellings of numbers, such as L03.
        if is_in_pass and (op.tile is None or verb.kind in IN_TILES) and str(found) == text:
            return found
    raise ValueError(f"expected an instruction such as 'wait L3.c0.F.dispatch', found {text!r}")


def parse_program(text: str) -> Program:
    """Parses a program from its text, which has one instruction on each line.

    Raises:
        ValueError: a line is no instruction; the message says which.
    """
    instructions: Program = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            instructions.append(_CUTS.get(line) or parse_instruction(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return instructions


def program_text(instructions: Program) -> str:
    """The text that :func:`parse_program` parses: one instruction on each line."""
    return "".join(f"{instruction}\n" for instruction in instructions)


def verbs_of(
    kind: LayerKind,
    has_shared_experts: bool,
    pads_to_capacity: bool = False,
    num_chunks: int = 1,
    dispatch: Dispatch = Dispatch.PLAIN,
    tiles: int = 0,
    own_rows: OwnRows = OwnRows.HALF,
) -> Layer:
    """What a chunk does in a layer of a kind, in order.

    Args:
        has_shared_experts: whether the model's MoE layers have experts that see all tokens.
        pads_to_capacity: whether routers give every expert equally many rows of a micro-batch. Then the numbers of rows
            are known without token counts, but not those of a chunk, which has any part of an expert's rows.
        num_chunks: number of chunks of a micro-batch.
        dispatch: what all-to-alls carry.
        tiles: see :class:`~megatron_lancet.schedule.plan.Segment`.
        own_rows: see :class:`~megatron_lancet.schedule.plan.Segment`.
    """
    left_out = set() if has_shared_experts else {OpKind.SHARED_EXPERTS}
    if pads_to_capacity and num_chunks == 1:
        left_out.add(OpKind.COUNTS)
    verbs = tuple(verb for verb in _VERBS[kind] if verb.kind not in left_out)
    if tiles:
        assert dispatch is not Dispatch.TWO_HOP
        return _in_tiles(verbs, tiles, own_rows)
    return _in_two_hops(verbs) if dispatch is Dispatch.TWO_HOP else verbs


def is_cut(kind: LayerKind, op: str, overlap_range: OverlapRange) -> bool:
    """Whether an op of a layer runs in chunks, where the micro-batch is cut.

    Args:
        op: kind of the op.
    """
    one_hop = _VERBS[kind]
    all_ways = one_hop, _in_two_hops(one_hop), _in_tiles(one_hop, 1, OwnRows.HALF)
    return any(verb.kind == op for verbs in all_ways for verb in _split(verbs, overlap_range)[1])


def mtp_layer(layer: Layer) -> Layer:
    """The verbs of a multi-token prediction: those of its transformer layer, after the projection of the whole."""
    return (_MTP_PROJECTION, *layer)


def program(layers: Sequence[tuple[int, Layer]], num_chunks: int, overlap_range: OverlapRange) -> Program:
    """Returns what runs in a segment's layers, forward, in order.

    Args:
        layers: global number and verbs of each.
        num_chunks: number of chunks of a micro-batch.
        overlap_range: the part of the layers that runs in chunks.
    """
    if num_chunks == 1:
        return [instruction for number, layer in layers for instruction in _placed(layer, number, 0)]
    instructions: Program = []
    for stack in _stacks(layers, overlap_range):
        parts = [(number, *_split(layer, overlap_range)) for number, layer in stack]
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
        if not stacks or overlap_range is not OverlapRange.STACK or layer[0] == _MTP_PROJECTION:
            stacks.append([])
        stacks[-1].append((number, layer))
    return stacks


def _split(layer: Layer, overlap_range: OverlapRange) -> tuple[Layer, Layer, Layer]:
    """Splits a layer into what runs on the whole micro-batch, then in chunks, then on the whole again."""
    if overlap_range.has_attention:
        num_whole = layer.count(_MTP_PROJECTION)
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
    waits = (index for index, verb in verbs if _ends_turn(verb))
    return [instructions[start:end] for start, end in pairwise([0, *waits, len(instructions)])]


def _ends_turn(verb: Verb) -> bool:
    """Whether a turn ends in front of a verb."""
    # A chunk waits within its turn for tiles behind the first one, and for messages inside a node, which are short:
    # otherwise its experts would wait until the next chunk's rows have come from other nodes.
    return isinstance(verb, Wait) and not verb.tile and verb.kind not in INSIDE_NODE


def _placed(verbs: Layer, layer: int, chunk: int) -> list[Instruction]:
    return [Instruction(verb, layer, chunk) for verb in verbs]
