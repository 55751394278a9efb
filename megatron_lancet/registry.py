"""The optional features of a run, a line each: the only file of the core that names them.

The lines are dotted names, which are imported on first use. So a planning tool does not import torch because a feature
does, and no import circle arises. To remove a feature, delete its folder and its line.
"""

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_lancet.feature import Feature

_FEATURES = (
    "megatron_lancet.features.bins.feature:BINS",
    "megatron_lancet.features.comm_priority.feature:COMM_PRIORITY",
    "megatron_lancet.features.row_bound.feature:ROW_BOUND",
    "megatron_lancet.features.wire.feature:WIRE",
    "megatron_lancet.features.locality.feature:LOCALITY",
    "megatron_lancet.features.placement.feature:PLACEMENT",
    "megatron_lancet.features.comm_sms.feature:COMM_SMS",
    "megatron_lancet.lab.causes.feature:CAUSES",
    "megatron_lancet.lab.views.feature:VIEWS",
    "megatron_lancet.testkit.mock.run:MOCKED_WORLD",
)
"""In the order in which a run asks them."""


@cache
def features() -> "tuple[Feature, ...]":
    """The features that this installation has."""
    return tuple(load(name) for name in _FEATURES)


def load(name: str) -> Any:
    """Imports ``module:attribute``."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)
