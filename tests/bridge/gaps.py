"""Lets Megatron-Bridge be imported without a GPU: a few modules import packages that a CPU can't have.

``peft/lora_layers.py`` names classes of Transformer Engine, ``training/pretrain.py`` a class of NVIDIA's resiliency
extension in an annotation, and ``data/energon`` bases of Energon's classes. None of them is used here.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_NOT_HERE = ("nvidia_resiliency_ext", "megatron.energon", "webdataset")
_TE = ("transformer_engine", "transformer_engine.pytorch")

SETTINGS_OF_SAMPLES: dict[str, Any] = {
    "reset_attention_mask": False,
    "reset_position_ids": False,
    "eod_mask_loss": False,
    "num_dataset_builder_threads": 1,
    "dataloader_type": "single",
    "num_workers": 0,
    "skip_getting_attention_mask_from_dataset": False,
    "create_attention_mask": True,
}
"""Settings of Bridge's data sets for Megatron's local attention, which takes a mask."""


def settings_of_local_layers() -> dict[str, Any]:
    """Settings of a Bridge model in fp32 with Megatron's local layers and without fused kernels."""
    import torch
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core.transformer.enums import AttnBackend

    fused = ("masked_softmax", "bias_activation", "bias_dropout", "apply_rope", "gradient_accumulation", "moe_permute")
    return {
        **{f"{name}_fusion": False for name in (*fused, "cross_entropy_loss")},
        **{f"{name}_dtype": torch.float32 for name in ("autocast", "pipeline", "params")},
        "cross_entropy_fusion_impl": "native",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "persist_layer_norm": False,
        "transformer_layer_spec": local_layer_spec,
        "attention_backend": AttnBackend.unfused,
    }


class _Anything(types.ModuleType):
    """A package in which each name is an empty class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(
            name,
            (),
            {"Sequential": object, "__init__": lambda self, *a, **k: None, "__class_getitem__": lambda item: object},
        )


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(name == root or name.startswith(f"{root}.") for root in _NOT_HERE):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: the names are made when they are asked for."""


@contextmanager
def filled() -> Iterator[None]:
    """Inside, Bridge can be imported; what it finds of Transformer Engine is forgotten afterwards.

    Megatron-Core must have been imported: it decides then that none of the packages is there.
    """
    import megatron.core.extensions.transformer_engine
    import megatron.core.utils  # noqa: F401

    finder = _Finder()
    sys.meta_path.insert(0, finder)
    stand_ins = {name: _Anything(name) for name in _TE}
    stand_ins[_TE[0]].pytorch = stand_ins[_TE[1]]
    with mock.patch.dict(sys.modules, stand_ins):
        yield
        imported = {name: module for name, module in sys.modules.items() if name not in stand_ins}
    sys.modules.update(imported)
    sys.meta_path.remove(finder)
