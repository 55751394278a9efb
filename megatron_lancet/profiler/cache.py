"""Stores profiles on disk by model, device and versions; refuses one that does not fit a run, field by field."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.files.reader import RecordError, differences
from megatron_lancet.files.records import to_plain
from megatron_lancet.planning.profile import ModelFacts, Profile, read_profile

_MEASURED = ("row_bytes", "combine_row_bytes", "counts_bytes", "prob_bytes")
"""Fields of the model that the profiler measures; they follow from the others."""


@dataclass(frozen=True)
class ProfileKey:
    """Identifies what was profiled; the measured fields of ``model`` don't count, ``versions`` are by package.

    Attributes:
        plans: the profiled plans, see :func:`names_of`. The planner tries only kinds of plans that were profiled.
    """

    model: ModelFacts
    device: str
    versions: dict[str, str]
    plans: tuple[str, ...] = ()

    @staticmethod
    def of(profile: Profile) -> "ProfileKey":
        """Returns the key of a profile that has all plans of its run."""
        return ProfileKey(profile.model, profile.device, profile.versions, names_of(profile.measured_steps_ms))

    def fields(self) -> dict[str, str]:
        """Returns everything that must agree, as text by name."""
        model = {name: json.dumps(value) for name, value in to_plain(self.model).items() if name not in _MEASURED}
        versions = {f"version of {name}": version for name, version in sorted(self.versions.items())}
        return {**model, "device": self.device, **versions, "profiled plans": "; ".join(self.plans)}

    def path(self, folder: Path) -> Path:
        """Returns the file that holds the profile with this key."""
        digest = hashlib.sha256(json.dumps(self.fields(), sort_keys=True).encode()).hexdigest()
        return folder / f"profile-{digest[:16]}.json"


def names_of(plans: Iterable[object]) -> tuple[str, ...]:
    """Plans as text, in order and without bounds of memory, on which measured times do not depend."""
    return tuple(sorted({re.sub(r" dw-memory=\S+", "", str(plan)) for plan in plans}))


def check_fits(profile: Profile, key: ProfileKey, where: str) -> None:
    """Checks that a profile belongs to a run.

    Args:
        where: name of the profile in the message, for example its path.

    Raises:
        RecordError: the profile has another model, device or version; the message names the fields.
    """
    found = [
        f"{name} is {theirs} in the profile, {ours} here"
        for name, (ours, theirs) in differences(key.fields(), ProfileKey.of(profile).fields(), absent="absent")
    ]
    if found:
        raise RecordError(f"{where} does not fit this run: {'; '.join(found)}. Profile this run anew.")


def load(folder: Path, key: ProfileKey) -> Profile | None:
    """Returns the profile that is kept for ``key``, None if there is none.

    Raises:
        RecordError: the file is damaged, or its content belongs to another key.
    """
    path = key.path(folder)
    if not path.exists():
        return None
    profile = read_profile(path)
    check_fits(profile, replace(key, plans=ProfileKey.of(profile).plans), str(path))
    return profile


def keep(folder: Path, profile: Profile, plans: tuple[str, ...]) -> Path:
    """Writes a profile into the file that :func:`load` reads; creates the folder.

    Args:
        plans: names of the plans of the run. The profile lacks plans that the model refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return write(replace(ProfileKey.of(profile), plans=plans).path(folder), profile)


def write(path: Path, profile: Profile) -> Path:
    """Writes a profile atomically."""
    atomic_write(path, profile.to_json() + "\n")
    return path
