"""Instructions print as text that parses back into them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import Dispatch
from megatron_lancet.schedule.turns import (
    MIRRORED,
    AddResidual,
    Compute,
    Concatenate,
    Cut,
    Instruction,
    Launch,
    LaunchCounts,
    Verb,
    Wait,
    mtp_layer,
    parse_instruction,
    parse_program,
    program_text,
    verbs_of,
)


def verbs_of_the_table() -> list[tuple[Verb, Phase]]:
    """Every verb of every layer, with tiles and without, in both passes."""
    kinds = [kind for kind in LayerKind if kind not in (LayerKind.MTP, LayerKind.NONE)]
    layers = [
        mtp_layer(verbs_of(kind, True, dispatch=dispatch, tiles=tiles))
        for kind, dispatch, tiles in itertools.product(kinds, Dispatch, (0, 1, 4))
        if not (tiles and dispatch is Dispatch.TWO_HOP)
    ]
    forward = dict.fromkeys(verb for layer in layers for verb in layer)
    backward = [MIRRORED[type(verb)](verb.kind, verb.tile) for verb in forward if type(verb) in MIRRORED]
    return [*((verb, Phase.FORWARD) for verb in forward), *((verb, Phase.INPUT_GRAD) for verb in backward)]


def placed(verb: tuple[Verb, Phase], place: tuple[int, int]) -> Instruction:
    return Instruction(verb[0], place[0], place[1], verb[1])


VERBS = verbs_of_the_table()
PLACES = st.tuples(st.integers(1, 1000), st.integers(0, 63))
INSTRUCTIONS = st.builds(placed, st.sampled_from(VERBS), PLACES)


@given(PLACES)
def test_every_instruction_parses_back_from_its_text(place):
    instructions = [placed(verb, place) for verb in VERBS]
    texts = [str(one) for one in instructions]
    assert [parse_instruction(text) for text in texts] == instructions
    assert len(set(texts)) == len(texts)


def test_the_table_has_every_kind_of_verb_and_op_of_layers():
    in_no_layer = {OpKind.EMBEDDING, OpKind.CUT, OpKind.HEAD}
    assert {type(verb) for verb, _ in VERBS} == {Compute, LaunchCounts, Launch, Wait, AddResidual}
    assert {verb.kind for verb, _ in VERBS} == set(OpKind) - in_no_layer


@given(st.lists(st.one_of(INSTRUCTIONS, st.sampled_from([Cut(), Concatenate()]))))
def test_programs_parse_back_from_their_text(program):
    assert parse_program(program_text(program)) == program


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("L3.c0.F.experts", Instruction(Compute(OpKind.EXPERTS), 3, 0)),
        ("launch L3.c1.F.counts", Instruction(LaunchCounts(OpKind.COUNTS), 3, 1)),
        ("launch L3.c1.t2.F.dispatch", Instruction(Launch(OpKind.DISPATCH, 2), 3, 1)),
        ("wait L12.c0.I.combine", Instruction(Wait(OpKind.COMBINE), 12, 0, Phase.INPUT_GRAD)),
        ("add residual in L3.c0.F.postprocess", Instruction(AddResidual(OpKind.POSTPROCESS), 3, 0)),
    ],
)
def test_text_of_an_instruction_is_the_documented_one(text, instruction):
    assert parse_instruction(text) == instruction
    assert str(instruction) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "cut", "L3.c0.F", "L3.c0.F.no_such_op", "F.head", "L3.W.mlp.linear_fc1"),
        *("L3.F.experts", "c0.F.experts", "L0.c0.F.experts", "L03.c0.F.experts", "L٣.c0.F.experts"),
        *("wait L3.c0.F.experts", "L3.c0.F.dispatch", "wait L3.c0.F.counts", "launch  L3.c0.F.dispatch"),
        *(" L3.c0.F.experts", "L3.c0.F.experts ", "L3.c0.F.experts\n", "Wait L3.c0.F.dispatch"),
        *("L3.c0.t0.F.attention", "L3.c0.W.experts", "launch L3.c0.I.counts"),
        *("add residual in L3.c0.I.postprocess", "residual in L3.c0.F.postprocess"),
    ],
)
def test_other_texts_are_no_instructions(text):
    with pytest.raises(ValueError, match=r"^expected an instruction such as 'wait L3\.c0\.F\.dispatch', found "):
        parse_instruction(text)


def test_line_of_a_program_that_is_no_instruction_is_named():
    with pytest.raises(ValueError, match=r"^line 2: expected an instruction such as .*, found 'waits'$"):
        parse_program("cut\nwaits\nconcatenate\n")
    with pytest.raises(ValueError, match=r"^line 1: .*, found ''$"):
        parse_program("\ncut\n")
