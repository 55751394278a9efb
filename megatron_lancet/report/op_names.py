"""Names of spans taken apart again: what a report sorts, colours and explains them by."""

import re
from dataclasses import dataclass

from megatron_lancet.schedule.ops import Op, Phase

_OF_CHUNK = re.compile(r"L(\d+)\.c(\d+)\.([FIW])\.(.+)", re.DOTALL)
_OF_LAYER = re.compile(r"L(\d+)\.([FIW])\.(.+)", re.DOTALL)
_OF_MODEL = re.compile(r"([FIW])\.(.+)", re.DOTALL)
_IN_WORDS = {
    Phase.FORWARD: "forward",
    Phase.INPUT_GRAD: "backward (input gradient)",
    Phase.WEIGHT_GRAD: "backward (weight gradient)",
}

EP_MESSAGES = frozenset({"counts", "dispatch", "combine"})
"""Kinds of messages in which all ranks of an expert-parallel group take part."""


@dataclass(frozen=True)
class OpName:
    """What the name of a span says. What it does not say is None.

    Attributes:
        text: the name.
        layer: Megatron's global layer number, from 1; None for an op beside the layers.
        chunk: from 0; None for an op of all chunks.
        phase: forward, input gradient or weight gradient.
        kind: what the op does; the whole name where it has no known form.
    """

    text: str
    layer: int | None
    chunk: int | None
    phase: Phase | None
    kind: str

    def in_words(self) -> str:
        """For a reader who does not know the names."""
        if self.layer is not None and self.chunk is not None and self.phase is not None:
            return Op(self.layer, self.chunk, self.phase, self.kind).in_words()
        where = [] if self.layer is None else [f"layer {self.layer}"]
        return ", ".join([*where, *([] if self.phase is None else [_IN_WORDS[self.phase]]), self.kind])


def parsed(name: str) -> OpName:
    """The parts of an op's name: ``L3.c0.F.experts``, ``L3.W.self_attention.linear_qkv``, ``F.head`` or any text."""
    if match := _OF_CHUNK.fullmatch(name):
        return OpName(name, int(match[1]), int(match[2]), Phase(match[3]), match[4])
    if match := _OF_LAYER.fullmatch(name):
        return OpName(name, int(match[1]), None, Phase(match[2]), match[3])
    if match := _OF_MODEL.fullmatch(name):
        return OpName(name, None, None, Phase(match[1]), match[2])
    return OpName(name, None, None, None, name)
