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
