"""Names of the ops of a step, and the verbs that say what is done with an op.

An op has the same name in plans, traces, timelines, errors and reports.

An op prints as ``L3.c0.F.experts`` (layer 3, chunk 0, forward, experts), ``L3.W.mlp.linear_fc1`` (the weight gradient
of a layer's linear layer, all chunks) or ``F.head`` (outside the layers), and is parsed from that string again.
"""

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, Self


class Phase(StrEnum):
    """The part of a step that an op belongs to."""

    FORWARD = "F"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"

    @property
    def description(self) -> str:
        """The phase for a reader who does not know the letters."""
        return _PHASES_IN_WORDS[self]


_PHASES_IN_WORDS = {
    Phase.FORWARD: "forward",
    Phase.INPUT_GRAD: "backward (input gradient)",
    Phase.WEIGHT_GRAD: "backward (weight gradient)",
}


class OpKind(StrEnum):
    """Kind of an op, in Megatron's words, in the order of the data. No other file spells these strings."""

    EMBEDDING = "embedding"
    """Token and position embedding, on the full micro-batch."""
    CUT = "cut"
    """Splitting a micro-batch into chunks, and concatenating them again."""
    ATTENTION = "attention"
    """Norm, self-attention and residual; in a layer with experts also the norm in front of the router."""
    NORM = "norm"
    """The norm in front of the router, in a layer with experts and without attention."""
    MLP = "mlp"
    """An MLP that sees all tokens in place of experts, with its norm and residual."""
    ROUTE = "route"
    """The router: probabilities and the routing map."""
    COUNTS = "counts"
    """Message: how many tokens each expert gets from each rank."""
    PREPROCESS = "preprocess"
    """Permuting a chunk's tokens into rows by destination rank, or with two hops by destination node."""
    DISPATCH = "dispatch"
    """Message: rows to the ranks of their experts."""
    NODE_DISPATCH = "node_dispatch"
    """Message, first of two hops: rows to the nodes of their experts."""
    NODE_ROWS = "node_rows"
    """Between two hops: making rows for the ranks of this node from those that have come to this node."""
    LOCAL_DISPATCH = "local_dispatch"
    """Message, second of two hops: rows to the ranks of their experts, inside the node."""
    SHARED_EXPERTS = "shared_experts"
    """The experts that see all tokens."""
    OWN_EXPERTS = "own_experts"
    """The routed experts of this rank, on the rows that stay on it, where the rows of other ranks come in tiles."""
    EXPERTS = "experts"
    """The routed experts of this rank, on the rows received; with tiles, on rows of other ranks."""
    COMBINE = "combine"
    """Message: the experts' outputs back to the ranks of their tokens."""
    LOCAL_COMBINE = "local_combine"
    """Message, first of two hops back: the experts' outputs, inside the node."""
    NODE_SUMS = "node_sums"
    """Between two hops back: summing what the ranks of this node have made of a token."""
    NODE_COMBINE = "node_combine"
    """Message, second of two hops back: a node's sums to the ranks of their tokens."""
    POSTPROCESS = "postprocess"
    """Summing the outputs of each token's experts, and the residual."""
    MTP_PROJECTION = "mtp_projection"
    """Runs before the layer of a multi-token prediction, on the full micro-batch: the norm of the layers before it,
    the embedding of the next tokens and the projection of both."""
    HEAD = "head"
    """Final norm, output layer and loss, on the full micro-batch."""

    @property
    def is_message(self) -> bool:
        """Whether it is communication in which all ranks of an expert-parallel group take part."""
        return self in _MESSAGES


BETWEEN_NODES = frozenset({OpKind.NODE_DISPATCH, OpKind.NODE_COMBINE})
"""Messages of two hops that leave the node."""
INSIDE_NODE = frozenset({OpKind.LOCAL_DISPATCH, OpKind.LOCAL_COMBINE})
"""Messages of two hops that stay inside the node."""
DISPATCHES = frozenset({OpKind.DISPATCH, OpKind.NODE_DISPATCH, OpKind.LOCAL_DISPATCH})
"""Messages with the experts' inputs, or in the backward with their gradients."""
FIRST_DISPATCHES = DISPATCHES - INSIDE_NODE
"""The dispatches whose rows are known when token counts have arrived: the others follow them."""
COMBINES = frozenset({OpKind.COMBINE, OpKind.LOCAL_COMBINE, OpKind.NODE_COMBINE})
"""Messages with the experts' outputs, or in the backward with their gradients."""
PAYLOADS = DISPATCHES | COMBINES
"""Messages that carry rows."""
_MESSAGES = PAYLOADS | {OpKind.COUNTS}
MEMORY_BOUND = frozenset(
    {
        OpKind.EMBEDDING,
        OpKind.CUT,
        OpKind.NORM,
        OpKind.ROUTE,
        OpKind.PREPROCESS,
        OpKind.NODE_ROWS,
        OpKind.NODE_SUMS,
        OpKind.POSTPROCESS,
    }
)
"""Ops that mostly move rows; the others are mostly matrix products, and so are weight gradients."""
IN_TILES = frozenset({OpKind.DISPATCH, OpKind.OWN_EXPERTS, OpKind.EXPERTS, OpKind.COMBINE})
"""Ops that a chunk may have for each part of its rows."""
_FORM = re.compile(
    r"(?:L(?P<layer>\d+)\.)?(?:c(?P<chunk>\d+)\.)?(?:t(?P<tile>\d+)\.)?(?P<phase>[FIW])\.(?P<kind>.+)", re.DOTALL
)


@dataclass(frozen=True)
class Op:
    """One op, for example ``L3.c0.F.dispatch``.

    Attributes:
        layer: Megatron's global layer number, from 1; None for an op outside the layers.
        chunk: index of the chunk in its micro-batch, from 0; None for an op of all chunks.
        phase: forward, input gradient (dX) or weight gradient (dW).
        kind: an :class:`OpKind`; of a weight gradient the weight's name inside its layer, or in the model.
        tile: index of the part of the chunk's rows, from 0; None for an op of all its rows.
    """

    layer: int | None
    chunk: int | None
    phase: Phase
    kind: str
    tile: int | None = None

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"L{self.layer}."
        return f"{layer}{self.within_layer()}"

    @staticmethod
    def weight_grad(layer: int | None, weight: str) -> "Op":
        """The weight gradient of a linear layer, for example ``L3.W.self_attention.linear_qkv``."""
        return Op(layer, None, Phase.WEIGHT_GRAD, weight)

    @staticmethod
    def beside_layers(phase: Phase, kind: str) -> "Op":
        """An op of the full micro-batch in no layer, for example ``F.head``."""
        return Op(None, None, phase, kind)

    @staticmethod
    def parse(name: str) -> "Op":
        """The op that prints as ``name``.

        Raises:
            ValueError: no op does.
        """
        op = Op.find(name)
        if op is None:
            raise ValueError(f"expected an op such as L3.c0.F.experts, L3.W.mlp.linear_fc1 or F.head, found {name!r}")
        return op

    @staticmethod
    def find(name: str) -> "Op | None":
        """Like :meth:`parse`; None for other names of spans, such as gradient reductions."""
        match = _FORM.fullmatch(name)
        if match is None:
            return None
        layer, chunk, tile = (None if match[part] is None else int(match[part]) for part in ("layer", "chunk", "tile"))
        if (layer is None and chunk is not None) or (chunk is None and tile is not None):
            return None
        kind = match["kind"]
        is_known = match["phase"] != Phase.WEIGHT_GRAD and kind in OpKind
        return Op(layer, chunk, Phase(match["phase"]), OpKind(kind) if is_known else kind, tile)

    def within_layer(self) -> str:
        """The name without its layer, for texts about several layers: ``c0.F.dispatch``."""
        chunk = "" if self.chunk is None else f"c{self.chunk}."
        tile = "" if self.tile is None else f"t{self.tile}."
        return f"{chunk}{tile}{self.phase}.{self.kind}"

    def description(self) -> str:
        """The op for a reader who does not know the names."""
        layer = [] if self.layer is None else [f"layer {self.layer}"]
        chunk = [] if self.chunk is None else [f"chunk {self.chunk}"]
        tile = [] if self.tile is None else [f"tile {self.tile}"]
        return ", ".join([*layer, *chunk, *tile, self.phase.description, self.kind])

    def with_kind(self, kind: OpKind) -> "Op":
        """The op of another kind at the same place and in the same phase; of all rows where it never is of a tile."""
        return Op(self.layer, self.chunk, self.phase, kind, self.tile if kind in IN_TILES else None)

    def mirrored(self) -> "Op":
        """The op that undoes this one's data movement in the backward pass."""
        return Op(self.layer, self.chunk, Phase.INPUT_GRAD, self.kind, self.tile)


@dataclass(frozen=True)
class Verb:
    """An instruction on an op; one subclass for each.

    Attributes:
        kind: kind of the op.
        tile: index of the part of the chunk's rows that it is for; None for all of them.
    """

    kind: OpKind
    tile: int | None = None
    prefix: ClassVar[str] = ""

    @property
    def untiled(self) -> Self:
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


@dataclass(frozen=True)
class Wait(Verb):
    """Wait for the message whose rows the next op needs.

    Attributes:
        ends_turn: whether the chunk's turn ends in front of it; else the chunk waits within its turn. It is no part of
            the verb's identity: a parsed program has it everywhere.
    """

    ends_turn: bool = field(default=True, compare=False)
    prefix = "wait "


class AddResidual(Verb):
    """Add the residual to the layer's output, as a part of the op."""

    prefix = "add residual in "


Layer = tuple[Verb, ...]
"""The instructions of a chunk in a layer, in order."""
