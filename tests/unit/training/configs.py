"""Settings of runs that know all features."""

from dataclasses import fields
from typing import Any

from megatron_lancet.config import LancetConfig
from megatron_lancet.features.pairing.feature import PairingChoice
from megatron_lancet.flags import CheckedFlags
from megatron_lancet.registry import features


def config_with(*flags: CheckedFlags, **settings: Any) -> LancetConfig:
    """
    Args:
        flags: of features; others have their defaults.
        settings: of the core, or single flags of features.
    """
    given = {type(one): one for one in flags}
    for kind in (feature.flags for feature in features() if feature.flags is not None):
        own = {entry.name: settings.pop(entry.name) for entry in fields(kind) if entry.name in settings}
        if own:
            given[kind] = kind(**own)
    return LancetConfig(**settings, features=features(), settings=given)


def cut_with(*flags: CheckedFlags, **settings: Any) -> LancetConfig:
    """As :func:`config_with`, without pairs: a plan that is made without measurements then has chunks."""
    return config_with(*flags, **{"pairing": PairingChoice.OFF, **settings})


def changed(config: LancetConfig, **settings: Any) -> LancetConfig:
    """
    Args:
        config: settings of a run that knows all features.
        settings: of the core, or single flags of features, with other values.
    """
    before = {entry.name: getattr(config, entry.name) for entry in fields(config) if entry.name not in _PARTS}
    flags = {entry.name: getattr(one, entry.name) for one in config.settings.values() for entry in fields(one)}
    return config_with(**{**before, **flags, **settings})


_PARTS = ("features", "settings")
