"""What the adapter for Megatron-Bridge does with a configuration; ``tests/bridge`` trains with the package itself."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.library.bridge import enable
from megatron_lancet.module_types import register_module_types

SETTINGS = {"num_chunks": 1}


class Callback:
    """Stands in for Bridge's."""


class AutoMapping:
    """Stands in for Bridge's."""

    types: ClassVar[dict[str, str]] = {"ColumnParallelLinear": "column"}
    _MODULE_TYPE_REGISTRY: ClassVar[dict[str, set[str]]] = {"column": {"ColumnParallelLinear"}}

    @classmethod
    def register_module_type(cls, name, kind):
        cls.types[name] = kind


@pytest.fixture
def bridge(monkeypatch):
    """The modules of Bridge that the adapter imports."""
    found = [("training.callbacks", Callback), ("models.conversion.param_mapping", AutoMapping)]
    for name, its_class in found:
        parts = ["megatron", "bridge", *name.split(".")]
        for end in range(2, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        setattr(sys.modules[f"megatron.bridge.{name}"], its_class.__name__, its_class)


def configuration(**of_model):
    return SimpleNamespace(
        ddp=SimpleNamespace(),
        train=SimpleNamespace(micro_batch_size=1, train_iters=4),
        model=SimpleNamespace(seq_length=16, **of_model),
        dataset=SimpleNamespace(),
    )


@pytest.mark.usefixtures("bridge")
def test_hook_runs_behind_hooks_that_come_later():
    hooks: list[Any] = []
    enable(configuration(register_pre_wrap_hook=hooks.append), **SETTINGS)
    stages = [torch.nn.Linear(2, 2)]
    hooks.append(lambda stages: stages)  # Bridge's for adapters
    for hook in hooks[:]:
        assert hook(stages) is stages
    assert len(hooks) == 3
    with pytest.raises(UsageError, match="found 0 in Linear"):  # the overlap's
        hooks[-1](stages)


@pytest.mark.usefixtures("bridge")
def test_hook_goes_into_a_list_of_hooks():
    hooks: list[Any] = []
    enable(configuration(pre_wrap_hooks=hooks), **SETTINGS)
    assert len(hooks) == 1


@pytest.mark.usefixtures("bridge")
def test_training_of_another_model_is_refused():
    (callback,) = enable(configuration(pre_wrap_hooks=[]), **SETTINGS)
    with pytest.raises(UsageError, match="Call enable\\(\\) with the configuration of this training"):
        callback.on_train_start(None)
    callback.on_train_end(None)


@pytest.mark.usefixtures("bridge")
def test_bridge_learns_the_classes_of_a_plan():
    class ColumnParallelLinear(torch.nn.Module):
        """Of Megatron's."""

    class Deferred(ColumnParallelLinear):
        """Of a plan's."""

    class TELinear(torch.nn.Module):
        parallel_mode = "row"

    register_module_types([torch.nn.Sequential(Deferred(), TELinear(), torch.nn.ReLU())])
    assert AutoMapping.types == {"ColumnParallelLinear": "column", "Deferred": "column", "TELinear": "row"}


def test_missing_bridge_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(UsageError, match=r"expected Megatron-Bridge, found none .*Install megatron-bridge"):
        enable(configuration())
