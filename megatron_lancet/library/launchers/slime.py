"""The overlap in slime and miles: ``--custom-megatron-init-path megatron_lancet.library.launchers.slime.install``."""

from typing import Any

from megatron_lancet.library.launchers import install_from_environment


def install(args: Any) -> None:
    """The function that the launcher calls on all ranks, when Megatron is initialised and before it builds the model.

    Args:
        args: the launcher's arguments.

    Raises:
        UsageError: see :func:`~megatron_lancet.library.launchers.install_from_environment`.
    """
    install_from_environment()
