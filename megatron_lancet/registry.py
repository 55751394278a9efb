"""The optional features of a run, a line each: the only file of the core that names them.

The lines are dotted names, which are imported on first use. So a planning tool does not import torch because a feature
does, and no import circle arises. To remove a feature, delete its folder and its line.
"""

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_lancet.feature import Feature
    from megatron_lancet.model.parts import ModelPart
    from megatron_lancet.runtime.position import Position

_FEATURES = (
    "megatron_lancet.lab.causes.feature:CAUSES",
    "megatron_lancet.lab.views.feature:VIEWS",
    "megatron_lancet.testkit.mock.run:MOCKED_WORLD",
)
"""In the order in which a run asks them."""
_MODEL_PARTS = (
    "megatron_lancet.features.hybrid.model:HYBRID",
    "megatron_lancet.features.mtp.model:PREDICTIONS",
    "megatron_lancet.features.te.model:TRANSFORMER_ENGINE",
    "megatron_lancet.features.documents.model:DOCUMENTS",
    "megatron_lancet.model.local_experts.part:LOCAL_EXPERTS",
    "megatron_lancet.features.dedup.ops:DEDUP",
    "megatron_lancet.features.two_hop.ops:TWO_HOP",
    "megatron_lancet.features.tiles.ops:TILES",
    "megatron_lancet.features.row_bound.ops:ROW_BOUND",
)
"""In the order in which they replace ops of a layer."""

_POSITION = "megatron_lancet.runtime.pairing:Pairing"
"""Without pairing it is ``megatron_lancet.runtime.position:Position``."""


@cache
def features() -> "tuple[Feature, ...]":
    """The features that this installation has."""
    return tuple(load(name) for name in _FEATURES)


def position_class() -> "type[Position]":
    """The class of the position of a rank."""
    found: type[Position] = load(_POSITION)
    return found


@cache
def model_parts() -> "tuple[ModelPart, ...]":
    """The optional parts of a model that this installation has."""
    return tuple(load(name) for name in _MODEL_PARTS)


def load(name: str) -> Any:
    """Imports ``module:attribute``."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)
