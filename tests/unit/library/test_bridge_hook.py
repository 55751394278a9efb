"""What the adapter for Megatron-Bridge does with a configuration; ``tests/bridge`` trains with the package itself."""

import sys
from copy import deepcopy
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_lancet.errors import UsageError
from megatron_lancet.library.bridge import enable
from megatron_lancet.library.overlap import Overlap
from megatron_lancet.module_types import register_module_types
from tests.small_gpt import EXPERTS, small_gpt, transformer_config

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

    def step(error):
        raise error

    def train(error, in_a_step=False):
        if in_a_step:
            step(error)
        raise error

    loop = SimpleNamespace(train=train, _maybe_destroy_process_group=lambda: "ended")
    sys.modules["megatron.bridge.training"].pretrain = loop
    return loop


def configuration(**of_model):
    return SimpleNamespace(
        ddp=SimpleNamespace(),
        train=SimpleNamespace(micro_batch_size=1, train_iters=4),
        model=SimpleNamespace(seq_length=16, **of_model),
        dataset=SimpleNamespace(),
    )


def built(hooks, stages):
    """Bridge's model, after the hooks: it runs them in order, and those that come meanwhile."""
    for hook in hooks:
        stages = hook(stages)
    return stages


def prepared():
    """A model's configuration with a hook of another's and the overlap's, which has got the model."""
    model = configuration(pre_wrap_hooks=[list])
    model.ddp = DistributedDataParallelConfig()
    enable(model, plan="off", num_micro_batches=2)
    built(model.model.pre_wrap_hooks, [small_gpt(transformer_config(**EXPERTS))])
    return model.model.pre_wrap_hooks


def test_hook_runs_behind_hooks_that_come_later(bridge):
    config, seen = configuration(), []
    enable(config, **SETTINGS)
    hooks, before = config.model._pre_wrap_hooks, dict(vars(bridge))
    hooks.append(lambda stages: seen.append("adapters") or stages)
    with pytest.raises(UsageError, match="found 0 in Linear"):  # the overlap's
        built(hooks, [torch.nn.Linear(2, 2)])
    assert seen == ["adapters"]
    assert (len(hooks), vars(bridge)) == (1, before)  # which only the overlap has left


@pytest.mark.usefixtures("bridge")
@pytest.mark.parametrize("of_model", [{}, {"pre_wrap_hooks": []}])
def test_next_call_takes_the_place_of_one_without_a_model(of_model):
    config = configuration(**of_model)
    enable(config, **SETTINGS)
    hooks = next(value for name, value in vars(config.model).items() if "hooks" in name)
    first = hooks[0]
    enable(config, **SETTINGS)
    assert len(hooks) == 1
    assert hooks[0] is not first


@pytest.mark.usefixtures("bridge")
def test_copy_of_a_configuration_has_a_hook_of_its_own():
    config = configuration(pre_wrap_hooks=[])
    enable(config, **SETTINGS)
    copied = deepcopy(config)
    with pytest.raises(UsageError, match="found 0 in Linear"):
        built(copied.model.pre_wrap_hooks, [torch.nn.Linear(2, 2)])
    assert (len(config.model.pre_wrap_hooks), len(copied.model.pre_wrap_hooks)) == (1, 0)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("error", "in_a_step", "ends_at_once"),
    [
        (SystemExit(0), False, True),
        (SystemExit(3), False, True),
        (SystemExit(3), True, False),
        (SystemExit(), False, False),
        (KeyError(), False, False),
    ],
)
def test_overlap_ends_with_each_training(bridge, error, in_a_step, ends_at_once):
    """At once, so that the report is sent before process groups end, where all ranks meet an exit condition.

    An exit in a step may be of one rank alone.
    """
    before = dict(vars(bridge))
    hooks = prepared()
    assert len(hooks) > 1
    with pytest.raises(type(error)):
        bridge.train(error, in_a_step)
    assert (Overlap._open is None) == (hooks == [list]) == ends_at_once
    assert bridge._maybe_destroy_process_group() == "ended"
    assert (Overlap._open, hooks, vars(bridge)) == (None, [list], before)


@pytest.mark.usefixtures("bridge")
def test_restart_in_the_process_is_refused():
    config = configuration(pre_wrap_hooks=[])
    config.inprocess_restart = SimpleNamespace(enabled=True)
    with pytest.raises(UsageError, match=r"found config.inprocess_restart.*Set config.inprocess_restart to None"):
        enable(config)
    config.inprocess_restart.enabled = False
    enable(config)


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
