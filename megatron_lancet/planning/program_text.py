"""Programs as text, which parses back: one instruction on each line."""

from dataclasses import replace

from megatron_lancet.planning.verbs import all_layers
from megatron_lancet.schedule.ops import IN_TILES, Op, Phase
from megatron_lancet.schedule.turns import MIRRORED, Concatenate, Cut, Instruction, Program

_CUTS: dict[str, Cut | Concatenate] = {str(one): one for one in (Cut(), Concatenate())}
_VERB_OF_TEXT = {(verb.prefix, str(verb.kind)): verb.untiled for layer in all_layers() for verb in layer}


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
