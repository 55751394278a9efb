"""The overlap in launchers without an argument for it; their settings are in the environment variable ``LANCET_FLAGS``.

Modules here are small, and import torch and Megatron only when the overlap is installed: launchers import them early,
and in processes that train nothing.
"""

import os
import shlex
from typing import TYPE_CHECKING

from megatron_lancet.config import FLAGS_VARIABLE
from megatron_lancet.errors import UsageError

if TYPE_CHECKING:
    from megatron_lancet.library.overlap import Overlap

_installed: "list[Overlap]" = []
"""The overlap of this process; empty before it is installed, and after :func:`close`."""


def install_from_environment() -> "Overlap":
    """Lets the first model with experts that Megatron's DDP wraps in this process run by a fixed plan.

    Micro-batches may have any shapes, packed (``packed_seq_params``) or not, and steps any number of them. The second
    call in a process returns the first one's overlap.

    Raises:
        UsageError: ``LANCET_FLAGS`` is not set, or has an unknown or wrong flag; or Megatron has another version.
    """
    if _installed:
        return _installed[0]
    flags = os.environ.get(FLAGS_VARIABLE)
    if flags is None:
        raise UsageError(
            f"expected the overlap's settings in {FLAGS_VARIABLE}, found none. Set it in the environment of all ranks, "
            f"such as {FLAGS_VARIABLE}='--lancet-num-chunks 1 --lancet-pairing on'."
        )
    from megatron_lancet.library.overlap import Overlap

    try:
        overlap = Overlap(flags=shlex.split(flags), packed_samples=True)
    except (UsageError, ValueError) as error:
        raise UsageError(f"{FLAGS_VARIABLE}: {error}") from error
    _installed.append(overlap.install())
    return overlap


def close() -> None:
    """Prints the report, and leaves Megatron as it was. Collective over all ranks, before their process groups end.

    Without an overlap in this process it does nothing.
    """
    if _installed:
        _installed.pop().close()
