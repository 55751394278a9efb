"""The flags of tuning."""

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_lancet.flags import CheckedFlags, flag, word_or_path


class CacheChoice(StrEnum):
    """Folder of measured profiles, if the user names none."""

    OFF = "off"
    """Profiles are not kept."""
    AUTO = "auto"
    """The user's cache folder."""


@dataclass(frozen=True)
class TuningFlags(CheckedFlags):
    """How a run measures, and where profiles are kept."""

    # The standard error of the median of ten steps is 0.4 standard deviations of a step.
    tune_steps: int = flag(
        10,
        parsed_as=int,
        at_least=1,
        metavar="N",
        help="training steps that auto measures at a time once it has a plan; a turn in the race of plans measures a "
        "third of them (default: {default}).",
    )
    cache: CacheChoice | Path = flag(
        CacheChoice.AUTO,
        read=word_or_path(CacheChoice),
        metavar="DIR",
        unchecked="",
        help="folder of measured profiles, which later runs of the same model on the same device use; off: no "
        "folder. Default: megatron-lancet in $XDG_CACHE_HOME or ~/.cache.",
    )
    profile: Path | None = flag(
        None,
        not_with_spec="; use lancet plan profile.",
        read=Path,
        metavar="FILE",
        unchecked="",
        help="measure ops, links and memory in the first steps, write them to FILE (JSON) and exit; "
        "lancet plan profile sets this flag.",
    )

    @property
    def cache_dir(self) -> Path | None:
        """Folder of measured profiles; None if profiles are not kept."""
        if isinstance(self.cache, Path):
            return self.cache
        if self.cache is CacheChoice.OFF:
            return None
        try:
            return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-lancet"
        except RuntimeError:  # no home, as in some containers
            return None
