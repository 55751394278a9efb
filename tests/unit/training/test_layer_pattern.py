"""Kinds of a model's layers by its flags, and patterns of hybrid models that are refused."""

import argparse
import sys

import pytest

from megatron_lancet.errors import USAGE_EXIT_CODE, UsageError
from megatron_lancet.schedule.layers import LayerKind, kinds_of_pattern, pattern_of
from megatron_lancet.training import spec
from megatron_lancet.training.layer_pattern import (
    check_hybrid_pattern,
    layer_kinds,
    mtp_layer_kinds,
    other_layers,
    pipeline_segments,
)
from megatron_lancet.training.plan.support import has_all_to_alls, unsupported
from megatron_lancet.training.process import exit as ending

ATTENTION, EXPERTS, MLP = LayerKind.ATTENTION_ONLY, LayerKind.MOE_ONLY, LayerKind.MLP_ONLY


@pytest.fixture
def hybrid(parser):
    def make(pattern: str, *words: str, flag: str = "--hybrid-layer-pattern") -> argparse.Namespace:
        command = "--moe-token-dispatcher-type alltoall --num-experts 4 --expert-model-parallel-size 2"
        return parser.parse_args([*command.split(), flag, pattern, *words])

    return make


@pytest.mark.parametrize("flag", ["--hybrid-layer-pattern", "--hybrid-override-pattern"])
def test_hybrid_pattern_says_the_kind_of_each_layer(hybrid, flag):
    args = hybrid("*E|-*", flag=flag)
    check_hybrid_pattern(args)
    assert layer_kinds(args) == [ATTENTION, EXPERTS, MLP, ATTENTION]
    assert pipeline_segments(args) == ["*E", "-*"]
    assert layer_kinds(hybrid("+E", flag=flag)) == [ATTENTION, EXPERTS]


def test_hybrid_pattern_has_layers_of_multi_token_prediction(hybrid):
    args = hybrid("*E*-/*E/*E")
    assert layer_kinds(args) == [ATTENTION, EXPERTS, ATTENTION, MLP]
    assert mtp_layer_kinds(args) == [ATTENTION, EXPERTS]


def test_pattern_of_layers_of_one_part_and_back():
    assert pattern_of(kinds_of_pattern("*E-+")) == "*E-*"
    assert pattern_of([LayerKind.DENSE, LayerKind.MOE]) is None


@pytest.mark.parametrize(
    ("pattern", "words", "message"),
    [
        ("*Ex", [], r"--hybrid-layer-pattern \*Ex: In main pattern, 'x' is not a valid layer symbol"),
        ("*E/*/E", [], r"All MTP patterns must be identical"),
        ("*E", ["--transformer-impl", "local"], "builds layers of Transformer Engine only"),
    ],
)
def test_hybrid_pattern_that_megatron_can_not_build_is_refused(hybrid, pattern, words, message):
    with pytest.raises(UsageError, match=message):
        check_hybrid_pattern(hybrid(pattern, *words))


def test_hybrid_model_without_a_pattern_is_refused(parser):
    with pytest.raises(UsageError, match="pass --hybrid-layer-pattern"):
        check_hybrid_pattern(parser.parse_args(["--is-hybrid-model"]))
    check_hybrid_pattern(parser.parse_args([]))


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("M*E-", r"with M (Mamba: "),
        ("G*E-", r"with G (gated delta net: "),
        ("DE", "with D (sparse attention: "),
        ("*E/*", "with / (multi-token prediction: "),
        ("*E-|*E", None),
        ("+E-", None),
    ],
)
def test_hybrid_layers_that_do_not_overlap_are_named(hybrid, pattern, found):
    args = hybrid(pattern)
    refused = [flag for flag, _ in unsupported(args, validated=True)]
    if found is None:
        assert other_layers(args) is None
        assert refused == []
    else:
        assert other_layers(args).startswith(found)
        assert refused == [f"--hybrid-layer-pattern {other_layers(args)}"]


def test_dry_run_does_not_guess_the_size_of_other_layers(hybrid):
    with pytest.raises(UsageError, match="the layers G, M are not known; plan files and dry runs support"):
        layer_kinds(hybrid("M*EG"))


def test_hybrid_model_has_all_to_alls_where_it_has_expert_layers(hybrid):
    assert has_all_to_alls(hybrid("*E"))
    assert not has_all_to_alls(hybrid("*-"))


@pytest.mark.parametrize("module", ["hybrid.hybrid_layer_specs", "mamba.mamba_layer_specs"])
def test_hybrid_scripts_name_layers_that_megatron_builds_anyway(hybrid, parser, module):
    spec = ["--spec", f"megatron.core.models.{module}", "mamba_stack_spec"]
    assert list(unsupported(hybrid("*E", *spec), validated=True)) == []
    gpt = parser.parse_args(["--moe-token-dispatcher-type", "alltoall", *spec])
    assert [flag for flag, _ in unsupported(gpt, validated=True)] == [" ".join(spec)]


def test_spec_entry_refuses_a_hybrid_model(monkeypatch, capsys):
    """Megatron's hybrid model keeps the function in place of its stack, and calls it with hidden states."""
    monkeypatch.setattr(ending, "exit_now", sys.exit)
    with pytest.raises(SystemExit) as end:
        spec.overlapped_gpt(hidden_states=None, attention_mask=None)
    assert end.value.code == USAGE_EXIT_CODE
    assert "is for GPT models. Start a hybrid model with pretrain_gpt_moe.py" in capsys.readouterr().err
