"""Names of ops print and parse both ways, and no file but their home spells a kind of op."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.plan import OverlapRange

PACKAGE = Path(__file__).parents[3] / "megatron_lancet"
NUMBERS = st.integers(0, 999)
WEIGHTS = st.sampled_from(["mlp.experts.linear_fc1", "self_attention.linear_qkv", "experts", "output_layer"])
OPS = st.one_of(
    st.builds(
        Op,
        NUMBERS,
        NUMBERS,
        st.sampled_from([Phase.FORWARD, Phase.INPUT_GRAD]),
        st.sampled_from(OpKind),
        st.none() | NUMBERS,
    ),
    st.builds(Op.weight_grad, st.none() | NUMBERS, WEIGHTS),
    st.builds(Op.beside_layers, st.sampled_from([Phase.FORWARD, Phase.INPUT_GRAD]), st.sampled_from(OpKind)),
)
SPELLED_ELSEWHERE = {
    # Megatron's own words, which happen to be the same.
    "model/adopt.py": {"mlp"},  # an attribute of its layers
    "model/recompute.py": {"mlp", "shared_experts"},  # values of --recompute-modules
    "training/plan/support.py": {"mlp", "shared_experts"},  # the same
    "planning/sizes/saved_tensors.py": {"mlp", "shared_experts"},  # the same
    "lab/check/shrink.py": {"mlp", "shared_experts"},  # the same
    "lab/estimate/layer_parts.py": {"mlp", "shared_experts"},  # the same
    "features/cuda_graphs/limits.py": {"mlp", "shared_experts"},  # the same
    "features/cuda_graphs/feature.py": {"attention"},  # a value of --lancet-cuda-graphs
    # Values of --lancet-range: what runs in chunks.
    "schedule/plan.py": {str(OverlapRange.EXPERTS)},
    "profiler/facts.py": {"experts"},  # a word of a profile's name
}


@given(OPS)
def test_ops_parse_from_what_they_print(op):
    parsed = Op.parse(str(op))
    assert parsed == op
    assert isinstance(parsed.kind, OpKind) == (op.phase is not Phase.WEIGHT_GRAD)


@pytest.mark.parametrize(
    "name", ["", "experts", "L3.experts", "c1.F.experts", "L3.c0.X.experts", "L3.t0.F.experts", "reduce.dense.b0.1"]
)
def test_names_of_no_op_are_not_parsed(name):
    assert Op.find(name) is None
    with pytest.raises(ValueError, match="expected an op such as"):
        Op.parse(name)


def test_ops_in_words_name_layer_chunk_and_phase():
    assert Op.parse("L3.c0.F.dispatch").description() == "layer 3, chunk 0, forward, dispatch"
    assert Op.parse("L3.W.mlp.linear_fc1").description() == "layer 3, backward (weight gradient), mlp.linear_fc1"
    assert Op.parse("I.head").description() == "backward (input gradient), head"


def test_ops_are_mirrored_and_named_within_a_layer():
    dispatch = Op.parse("L3.c1.F.dispatch")
    assert str(dispatch.mirrored()) == "L3.c1.I.dispatch"
    assert dispatch.within_layer() == "c1.F.dispatch"
    assert str(dispatch.with_kind(OpKind.EXPERTS)) == "L3.c1.F.experts"


def test_ops_of_tiles_are_named_by_them():
    dispatch = Op.parse("L3.c1.t2.F.dispatch")
    assert (dispatch.tile, dispatch.within_layer()) == (2, "c1.t2.F.dispatch")
    assert dispatch.description() == "layer 3, chunk 1, tile 2, forward, dispatch"
    assert str(dispatch.mirrored()) == "L3.c1.t2.I.dispatch"
    assert str(dispatch.with_kind(OpKind.EXPERTS)) == "L3.c1.t2.F.experts"
    assert str(dispatch.with_kind(OpKind.PREPROCESS)) == "L3.c1.F.preprocess"  # of all rows


def spelled_kinds(path: Path) -> set[str]:
    """Kinds of ops that are string literals of a file."""
    literals = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    return {kind for kind in map(str, OpKind) if kind in literals}


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "schedule" / "ops.py"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_no_literal_spells_an_op_kind(path):
    name = str(path.relative_to(PACKAGE))
    assert spelled_kinds(path) <= SPELLED_ELSEWHERE.get(name, set())


def test_exceptions_for_literals_are_needed():
    assert {name: spelled_kinds(PACKAGE / name) for name in SPELLED_ELSEWHERE} == SPELLED_ELSEWHERE
