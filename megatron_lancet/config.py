"""The ``--lancet-*`` flags: name, values, default, help, unit and range of each.

A flag is a field of a dataclass. ``training/arguments.py`` makes the parser from the fields, and the dataclass from the
parsed arguments; the dataclass refuses a value outside its range.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatron_lancet.errors import UsageError
from megatron_lancet.schedule.plan import ChunkDim, Dispatch, DwPolicy, OverlapRange
from megatron_lancet.schedule.reductions import DEFAULT_CHUNK_MB, CommPriority
from megatron_lancet.schedule.units import mb_to_bytes
from megatron_lancet.schedule.wire import Wire

_METADATA_KEY = "flag"


class PlanChoice(StrEnum):
    """Source of the plan, other than a file."""

    OFF = "off"
    """No plan: stock Megatron modules."""
    AUTO = "auto"
    """Found while training, or fixed by other flags."""


class AttentionChoice(StrEnum):
    """Core attention of the overlapping block."""

    AUTO = "auto"
    """Megatron's, bit for bit, where it supports what the plan needs; else the fused kernel."""
    STOCK = "stock"
    """Megatron's."""
    SDPA = "sdpa"
    """torch's fused kernel."""


class PairingChoice(StrEnum):
    """Whether the backward of each micro-batch runs beside the forward of the next one."""

    ON = "on"
    """In every plan."""
    OFF = "off"
    """In none."""


class CacheChoice(StrEnum):
    """Where measured profiles are kept, other than in a folder that the user names."""

    OFF = "off"
    """Profiles are not kept."""
    AUTO = "auto"
    """The user's cache folder."""


@dataclass(frozen=True)
class Flag:
    """How the command line sets a field.

    Attributes:
        help: text of ``--help``; ``{default}`` in it is the field's default.
        parsed_as: type of the parsed argument. It is plain, because Megatron saves its arguments in checkpoints.
        read: converts the parsed argument to the field's value.
        choices: words that the flag accepts; empty if it accepts any text.
        none_word: the choice that leaves the field at None, if there is one.
        metavar: name of the value in ``--help``; None to list the choices.
        unit: unit of a number, for messages; empty for a count.
        at_least: smallest value, if there is a bound.
        above: bound that a finite value must exceed, if there is one.
        advice: sentence that follows the refusal of a value outside the range.
        limits_plan: whether a value limits the choice of a plan.
        name: the flag's name, if it does not follow from the field's name.
    """

    help: str
    parsed_as: type = str
    read: Callable[[Any], Any] = lambda value: value
    choices: tuple[str, ...] = ()
    none_word: str | None = None
    metavar: str | None = None
    unit: str = ""
    at_least: int | None = None
    above: float | None = None
    advice: str = ""
    limits_plan: bool = False
    name: str = ""

    def value_of(self, parsed: Any) -> Any:
        """Converts a parsed argument to the field's value."""
        return None if parsed in (None, self.none_word) else self.read(parsed)

    def check(self, name: str, value: Any) -> None:
        """Checks a value of the flag with this name.

        Raises:
            UsageError: the value is outside the range.
        """
        if self.at_least is not None and value < self.at_least:
            raise UsageError(f"{name} expects at least {self.at_least}, got {value}. {self.advice}".strip())
        if self.above is not None and not self.above < value < math.inf:
            expected = f"a number of {self.unit} above {self.above:g}"
            raise UsageError(f"{name} expects {expected}, got {value:g}. {self.advice}".strip())


def flags_of(config_class: type) -> Iterator[tuple[str, "dataclasses.Field[Any]", Flag]]:
    """Yields the flags of a dataclass: (name of the flag, field, how the flag sets it)."""
    for entry in dataclasses.fields(config_class):
        flag: Flag = entry.metadata[_METADATA_KEY]
        yield flag.name or f"--lancet-{entry.name.replace('_', '-')}", entry, flag


class _CheckedFlags:
    """Base of the dataclasses of flags: refuses a value outside the range of its flag."""

    def __post_init__(self) -> None:
        for name, entry, flag in flags_of(type(self)):
            value = getattr(self, entry.name)
            if value is not None:
                flag.check(name, value)


def _flag(default: Any, **settings: Any) -> Any:
    return field(default=default, metadata={_METADATA_KEY: Flag(**settings)})


def _words(kind: type[StrEnum], none_word: str | None = None) -> dict[str, Any]:
    """Settings of a flag that takes a member of an enumeration, or ``none_word``, which leaves the field at None."""
    words = tuple(member.value for member in kind)
    return {"choices": words if none_word is None else (none_word, *words), "none_word": none_word, "read": kind}


def _word_or_path(kind: type[StrEnum]) -> Callable[[str], StrEnum | Path]:
    return lambda text: kind(text) if text in list(kind) else Path(text)


@dataclass(frozen=True)
class LancetConfig(_CheckedFlags):
    """The settings of a run. Each field is a flag, whose help explains it.

    A field that is None leaves the choice to the plan, or switches its feature off.

    Raises:
        UsageError: a value is outside the range of its flag.
    """

    plan: PlanChoice | Path = _flag(
        PlanChoice.AUTO,
        read=_word_or_path(PlanChoice),
        metavar="{auto,off,FILE}",
        help="auto (default): measures the first steps, finds the fastest plan and switches to it; with "
        "--lancet-num-chunks a fixed plan instead. off: stock Megatron modules. FILE: a plan file of "
        "tools/make_plan.py that was made for this model and layout.",
    )
    num_chunks: int | None = _flag(
        None,
        parsed_as=int,
        at_least=1,
        limits_plan=True,
        metavar="K",
        help="cut each micro-batch into K chunks; by default the plan chooses. 1 leaves it whole.",
    )
    chunk_dim: ChunkDim | None = _flag(
        None,
        **_words(ChunkDim, none_word="auto"),
        limits_plan=True,
        help="dimension along which micro-batches are cut: batch, sequence (chunks attend to the keys and values of "
        "earlier ones: also a micro-batch of 1 can be cut), or auto (default): the plan chooses; a fixed plan takes "
        "batch where it has enough samples.",
    )
    range: OverlapRange | None = _flag(
        None,
        **_words(OverlapRange),
        limits_plan=True,
        help="what runs chunk by chunk: experts (dispatch to combine), gate (router to combine), layer (with its "
        "attention), stack (all layers without waiting at a layer's end). By default the plan chooses; a fixed plan "
        "takes stack.",
    )
    pairing: PairingChoice | None = _flag(
        None,
        **_words(PairingChoice, none_word="auto"),
        limits_plan=True,
        help="with gradient accumulation, run the backward of each micro-batch beside the forward of the next one, so "
        "that the messages of one are in flight while the other computes; needs no chunks. auto (default): the plan "
        "chooses; a fixed plan pairs where --overlap-moe-expert-parallel-comm is given and pairing is possible.",
    )
    dispatch: Dispatch | None = _flag(
        None,
        **_words(Dispatch, none_word="auto"),
        limits_plan=True,
        help="rows that all-to-alls carry: plain (one per token and chosen expert, as stock), dedup (one per token and "
        "rank that holds any of its experts: fewer bytes where a rank holds several), auto (default): the plan "
        "chooses; a fixed plan takes plain, and with --moe-token-dispatcher-type flex every plan takes dedup where it "
        "is possible.",
    )
    attention: AttentionChoice = _flag(
        AttentionChoice.AUTO,
        **_words(AttentionChoice),
        help="core attention: stock (Megatron's), sdpa (torch's fused kernel), auto (default): stock unless sequence "
        "chunks, context parallelism or multi-latent attention need sdpa.",
    )
    dw_policy: DwPolicy | None = _flag(
        None,
        **_words(DwPolicy),
        limits_plan=True,
        help="weight gradients: fill runs them while a backward all-to-all is in flight, none at once. By default the "
        "plan chooses; a fixed plan fills.",
    )
    dw_memory_mb: float | None = _flag(
        None,
        parsed_as=float,
        above=0,
        unit="MB",
        limits_plan=True,
        metavar="MB",
        advice="To run weight gradients at once pass --lancet-dw-policy none; without the flag memory for them is not "
        "bounded.",
        help="memory (10^6 bytes) that deferred weight gradients may keep alive on a rank; when it is full the oldest "
        "run first. By default only the plan's window bounds it.",
    )
    comm_priority: CommPriority = _flag(
        CommPriority.OFF,
        **_words(CommPriority),
        help="all-to-all-first cuts gradient reductions into parts that run only where no all-to-all of the backward "
        "pass is in flight or about to start; needs --overlap-grad-reduce. off (default): Megatron reduces each bucket "
        "as soon as it is complete.",
    )
    grad_chunk_mb: float = _flag(
        DEFAULT_CHUNK_MB,
        parsed_as=float,
        above=0,
        unit="MB",
        metavar="MB",
        advice="To reduce whole buckets pass --lancet-comm-priority off.",
        help="with --lancet-comm-priority, gradients (10^6 bytes) in one such part, and at one place between two "
        "all-to-alls, at most (default: {default:g}).",
    )
    comm_sms: int | None = _flag(
        None,
        parsed_as=int,
        at_least=1,
        metavar="N",
        advice="Without the flag NCCL chooses.",
        help="streaming multiprocessors (SMs) of a GPU that an all-to-all of expert parallelism may take from the "
        "kernels beside it, at most; a power of two. By default NCCL chooses.",
    )
    wire: Wire = _flag(
        Wire.EXACT,
        **_words(Wire),
        help="number format of hidden states in the all-to-alls of expert parallelism. exact (default): their own. "
        "bf16: 16 bits for those of 32. fp8: 8 bits, with a scale for each 128, in forward dispatches, and bf16 "
        "in combines and gradients. Other formats than exact change losses and gradients; auto never chooses one.",
    )
    experts_apart: bool = _flag(
        False,
        parsed_as=bool,
        help="with --expert-model-parallel-size 1, keep experts' gradients and optimizer state apart from dense "
        "weights', as with larger sizes: a run may then go on from a checkpoint with the other size, and back.",
    )
    report_dir: Path | None = _flag(
        None,
        name="--lancet-report",
        read=Path,
        metavar="DIR",
        help="also write the closing report to DIR/report.json, and beside it the plan, the profile and the timeline "
        "of a step (timeline.html, trace.json).",
    )
    # The standard error of the median of ten steps is 0.4 standard deviations of a step.
    tune_steps: int = _flag(
        10,
        parsed_as=int,
        at_least=1,
        metavar="N",
        help="training steps that auto measures at a time, before and after a change of plan (default: {default}).",
    )
    cache: CacheChoice | Path = _flag(
        CacheChoice.AUTO,
        read=_word_or_path(CacheChoice),
        metavar="DIR",
        help="where auto keeps measured profiles, so that later runs of the same model on the same device need not "
        "measure again; off keeps none. Default: megatron-lancet in $XDG_CACHE_HOME or ~/.cache.",
    )
    profile: Path | None = _flag(
        None,
        read=Path,
        metavar="FILE",
        help="measure ops, links and memory in the first steps, write them to FILE (JSON) and end; "
        "tools/profile_model.py sets it.",
    )

    @property
    def dw_memory_bytes(self) -> int | None:
        """Bytes that deferred weight gradients may keep alive on a rank; None for no bound."""
        return None if self.dw_memory_mb is None else mb_to_bytes(self.dw_memory_mb)

    @property
    def grad_chunk_bytes(self) -> int:
        """Most gradient bytes that one collective reduces under ``--lancet-comm-priority``."""
        return mb_to_bytes(self.grad_chunk_mb)

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

    def explicit_plan_flags(self) -> dict[str, object]:
        """The flags by which the user limits the plan, with their values."""
        values = {name: getattr(self, entry.name) for name, entry, flag in flags_of(LancetConfig) if flag.limits_plan}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class DryRunConfig(_CheckedFlags):
    """Whether the run only validates its command line, and for how many ranks.

    Raises:
        UsageError: a value is outside the range of its flag, or a world size is given to a run that is no dry run.
    """

    dry_run: bool = _flag(
        False,
        parsed_as=bool,
        help="parse and validate everything as for a cluster with GPUs, print model size, parallel layout, memory per "
        "GPU and plan, and end: one process, no GPU, no data needed. Files and packages that are missing here are "
        "warnings; what the run itself would refuse is an error.",
    )
    world_size: int | None = _flag(
        None,
        parsed_as=int,
        at_least=1,
        metavar="N",
        help="with --lancet-dry-run: ranks to validate for. Default: WORLD_SIZE of the environment, else the fewest "
        "that the parallel sizes allow.",
    )

    def __post_init__(self) -> None:
        if self.world_size is not None and not self.dry_run:
            raise UsageError(
                f"--lancet-world-size {self.world_size} is for --lancet-dry-run: a run gets its number of ranks from "
                "its launcher. Drop it."
            )
        super().__post_init__()


def is_dry_run(command_line: Sequence[str]) -> bool:
    """Whether a command line asks for a dry run, before it is parsed; Megatron's parser takes no abbreviations."""
    return next(name for name, entry, _ in flags_of(DryRunConfig) if entry.name == "dry_run") in command_line
