"""The optional features of a run, a line each: the only file of the core that names them.

The lines are dotted names, imported on first use: planning tools stay without torch, and no import circle arises. To
remove a feature, delete its folder and its lines.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from megatron_lancet.errors import UsageError

if TYPE_CHECKING:
    from megatron_lancet.feature import Feature
    from megatron_lancet.model.parts import ModelPart
    from megatron_lancet.runtime.position import Position
    from megatron_lancet.schedule.dispatch import Dispatch

_FEATURES: tuple[str, ...] = (
    "megatron_lancet.features.tuning.feature:TUNING",
    "megatron_lancet.features.shortcut.feature:SHORTCUT",  # before pairs, which take the plan as it is
    "megatron_lancet.features.tiles.feature:TILES",
    "megatron_lancet.features.pairing.feature:PAIRING",
    "megatron_lancet.features.two_hop.feature:NODES",
    "megatron_lancet.features.documents.feature:DOCUMENTS",
    "megatron_lancet.features.mtp.feature:PREDICTIONS",
    "megatron_lancet.features.te.feature:TRANSFORMER_ENGINE_LAYERS",
    "megatron_lancet.features.hybrid.feature:HYBRID",
    "megatron_lancet.features.ep_resize.feature:EP_RESIZE",
    "megatron_lancet.features.bins.feature:BINS",
    "megatron_lancet.features.comm_priority.feature:COMM_PRIORITY",
    "megatron_lancet.features.row_bound.feature:ROW_BOUND",
    "megatron_lancet.features.hugging_face.feature:HUGGING_FACE",  # before placement, which moves weights
    "megatron_lancet.features.placement.feature:PLACEMENT",
    "megatron_lancet.features.comm_sms.feature:COMM_SMS",
    "megatron_lancet.features.checkpoints.feature:CHECKPOINTS",
    "megatron_lancet.features.cuda_graphs.feature:CUDA_GRAPHS",
    "megatron_lancet.lab.causes.feature:CAUSES",
    "megatron_lancet.lab.views.feature:VIEWS",
    "megatron_lancet.testkit.mock.run:MOCKED_WORLD",
)
"""In the order in which a run asks them."""
_MODEL_PARTS: tuple[str, ...] = (
    "megatron_lancet.features.hybrid.model:HYBRID",
    "megatron_lancet.features.mtp.model:PREDICTIONS",
    "megatron_lancet.features.shortcut.model:SHORTCUT",
    "megatron_lancet.features.te.model:TRANSFORMER_ENGINE",
    "megatron_lancet.features.documents.model:DOCUMENTS",
    "megatron_lancet.model.local_experts.part:LOCAL_EXPERTS",
    "megatron_lancet.features.dedup.ops:DEDUP",
    "megatron_lancet.features.two_hop.ops:TWO_HOP",
    "megatron_lancet.features.tiles.ops:TILES",
    "megatron_lancet.features.row_bound.ops:ROW_BOUND",
)
"""In the order in which they replace ops of a layer."""

_POSITION: tuple[str, ...] = (
    "megatron_lancet.features.pairing.pairing:Pairing",  # a line of its own, as each feature has
)
"""The position of a rank whose forwards run beside backwards; empty where none do."""
_BY_NAME: dict[str, str] = {
    "--lancet-dry-run": "megatron_lancet.lab.dry_run.run:run_dry",
    "export-hf": "megatron_lancet.features.hugging_face.export:Export",
    "late-sum": "megatron_lancet.features.shortcut.order:late_sum",
}
"""What flags run in place of a training, and what commands of ``lancet`` and stacks of layers take."""

_DISPATCHES: tuple[str, ...] = (  # simplest first
    "megatron_lancet.schedule.dispatch:PLAIN",
    "megatron_lancet.features.dedup.order:DEDUP",
    "megatron_lancet.features.two_hop.order:TWO_HOP",
)

_TILED: tuple[str, ...] = (
    "megatron_lancet.features.tiles.order:Tiled",  # a line of its own, as each feature has
)
"""Makes a dispatch with tiles of another one; empty where no dispatch has tiles."""


@cache
def features() -> "tuple[Feature, ...]":
    """The features that this installation has."""
    return tuple(load(name) for name in _FEATURES)


@cache
def dispatches() -> "Mapping[str, Dispatch]":
    """The dispatches that this installation has, by name."""
    return {dispatch.name: dispatch for dispatch in map(load, _DISPATCHES)}


def has_tiles() -> bool:
    """Whether this installation has tiles."""
    return bool(_TILED)


def tiled() -> "Callable[..., Dispatch]":
    """Makes a dispatch with tiles: from another one, the number of tiles, and when local tokens run."""
    made: Callable[..., Dispatch] = load(_TILED[0])
    return made


def position_class() -> "type[Position]":
    """The class of the position of a rank."""
    found: type[Position] = load(next(iter(_POSITION), "megatron_lancet.runtime.position:Position"))
    return found


def has_pairing() -> bool:
    """Whether this installation lets forwards run beside backwards."""
    return bool(_POSITION)


@cache
def model_parts() -> "tuple[ModelPart, ...]":
    """The optional parts of a model that this installation has."""
    return tuple(load(name) for name in _MODEL_PARTS)


def by_name(name: str) -> Callable[..., Any]:
    """What a feature or the lab has under a name.

    Raises:
        UsageError: the installation does not have it.
    """
    if name not in _BY_NAME:
        raise UsageError(f"this installation of Megatron-Lancet has no {name}. Install the full package.")
    run: Callable[..., Any] = load(_BY_NAME[name])
    return run


def load(name: str) -> Any:
    """Imports ``module:attribute``."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)
