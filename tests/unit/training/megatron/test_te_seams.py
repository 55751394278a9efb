"""The seams of Transformer Engine exist in the pinned wheel, and what another version lacks is named in a line."""

import importlib
import inspect

import pytest
from packaging.version import Version

from megatron_lancet.errors import UsageError
from megatron_lancet.features.te.seams import check_te_seams
from tests.te_cpu import SITE

PINNED = Version("2.20.2")


def source(module: str) -> str:
    """Source text of a module of Megatron, or of the wheel, which is read without an import."""
    if module.startswith("megatron."):
        return inspect.getsource(importlib.import_module(module))
    return (SITE / module.replace(".", "/")).with_suffix(".py").read_text()


def test_pinned_transformer_engine_has_all_seams():
    check_te_seams(lambda: PINNED, source)


@pytest.mark.parametrize("version", ["2.7", "2.7.0.post0", "1.13"])
def test_old_transformer_engine_is_refused(version):
    with pytest.raises(
        UsageError, match=rf"expected Transformer Engine 2\.8 or newer, found {version}, .*local"
    ) as old:
        check_te_seams(lambda: Version(version), source)
    assert "\n" not in str(old.value)


DIFFERENCES = {
    "store": ("linear", ".put([inputmat_total, grad_output], wgrad_gemm)", ".put(wgrad_gemm)", "put of 2 tensors"),
    "grouped store": ("grouped_linear", "wgrad_list], grouped_gemm_wgrad)", "x, y], f)", "put of 3 tensors"),
    "accumulation": ("layernorm_linear", "and not ctx.is_first_microbatch", "", "dW is added to main_grad"),
    "workspaces": ("base", "_fp8_workspaces", "_workspaces", "the attribute _fp8_workspaces"),
    "put": ("_common", "def put(self, tensor_list, func)", "def put(self, work)", "WeightGradStore.put"),
}


@pytest.mark.parametrize(("module", "here", "there", "message"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_part_that_transformer_engine_lacks_is_named(module, here, there, message):
    name = f"transformer_engine.pytorch.module.{module}"

    def changed(asked: str) -> str:
        text = source(asked)
        if asked != name:
            return text
        assert here in text
        return text.replace(here, there)

    with pytest.raises(UsageError, match=rf"2\.20\.2, differs .* it lacks .*{message}.* in {name}") as refusal:
        check_te_seams(lambda: PINNED, changed)
    assert "\n" not in str(refusal.value)


def test_megatrons_wrappers_are_checked_too():
    def changed(asked: str) -> str:
        return source(asked).replace("def forward(self, x, m_splits)", "def forward(self, x, splits)")

    with pytest.raises(UsageError, match=r"grouped linear's forward\(x, m_splits\) in megatron\.core\.extensions"):
        check_te_seams(lambda: PINNED, changed)
