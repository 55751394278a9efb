"""Settings that GPU runs enable and CPU runs disable have a comparison with stock, or a reason for none."""

import argparse
import ast
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from megatron.core.extensions import transformer_engine as megatron_te

from megatron_lancet.patching import replaced
from megatron_lancet.training.platform.detect import _CPU_SETTINGS, apply_cpu_settings
from tests.parity.gpu_defaults import cases
from tests.parity.gpu_defaults.cases import DEFAULTS
from tests.parity.te import recompute_and_permutation_worker
from tests.small_gpt import SETTINGS

REPO = Path(__file__).parents[4]
CASES = {**cases.CASES, **recompute_and_permutation_worker.CASES}
_ARGUMENT_OF = {"bias_activation_fusion": ("bias_gelu_fusion", "bias_swiglu_fusion")}
"""Arguments whose configuration field has a different name."""


class Recorded(argparse.Namespace):
    """Arguments that record changes after parsing."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        vars(self).setdefault("_names", set()).add(name)


def switched_off(monkeypatch: pytest.MonkeyPatch, has_te: bool) -> set[str]:
    """Returns the names of the arguments that the CPU settings change."""
    from megatron.training.arguments import parse_args

    monkeypatch.setattr(sys, "argv", ["pretrain", "--transformer-impl", "transformer_engine"])
    args = Recorded()
    vars(args).update(vars(parse_args()))
    with replaced(megatron_te, "HAVE_TE", has_te):
        apply_cpu_settings(args)
    names: set[str] = vars(args)["_names"]
    return names


def missing(switched: set[str], defaults: dict[str, cases.Default]) -> set[str]:
    """Returns changed arguments without a case or a reason."""
    return {name for name in switched if name not in defaults or not (defaults[name].cases or defaults[name].reason)}


@pytest.mark.parametrize("has_te", [False, True])
def test_every_cpu_setting_is_compared_with_stock_or_explained(monkeypatch, has_te):
    switched = switched_off(monkeypatch, has_te)
    assert switched >= _CPU_SETTINGS.keys() | {"attention_backend"}
    assert missing(switched, DEFAULTS) == set()
    one_less = {name: default for name, default in DEFAULTS.items() if name != "apply_rope_fusion"}
    assert missing(switched, one_less) == {"apply_rope_fusion"}


def test_every_switch_of_the_tests_models_is_known():
    off = {name for name, value in SETTINGS.items() if value is False and name.endswith("fusion")}
    assert off == {"bias_dropout_fusion", "bias_activation_fusion"}
    for name in off:
        assert {*_ARGUMENT_OF.get(name, (name,))} <= DEFAULTS.keys()


@pytest.mark.parametrize("name", DEFAULTS)
def test_named_comparison_exists_and_has_the_setting_on(name):
    default = DEFAULTS[name]
    assert bool(default.cases) != bool(default.reason)
    for case in default.cases:
        overrides = CASES[case][0]
        assert {field: overrides[field] for field in default.on} == default.on
    if name != "bias_dropout_fusion" and default.cases:
        assert any(CASES[case][1] > 1 for case in default.cases), "needs a case with several chunks"


@pytest.mark.parametrize("name", [name for name, default in DEFAULTS.items() if default.reason])
def test_what_has_a_reason_has_a_test_of_what_is_done_with_it(name):
    path, _, function = DEFAULTS[name].test.partition("::")
    tree = ast.parse((REPO / path).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_no_layer_of_megatron_reads_use_flash_attn():
    """Layers read arguments from fields of their configuration."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    names = {field.name for field in fields(MLATransformerConfig)}
    assert "attention_backend" in names
    assert "use_flash_attn" not in names
