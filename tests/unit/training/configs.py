"""Settings of runs that know all features."""

from typing import Any

from megatron_lancet.config import LancetConfig
from megatron_lancet.flags import CheckedFlags
from megatron_lancet.registry import features


def config_with(*flags: CheckedFlags, **settings: Any) -> LancetConfig:
    """
    Args:
        flags: of features; others have their defaults.
        settings: of the core.
    """
    return LancetConfig(**settings, features=features(), settings={type(one): one for one in flags})
