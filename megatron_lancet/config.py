"""The ``--lancet-*`` flags: name, values, default, help, unit and range of each.

A flag is a field of a dataclass. ``training/arguments.py`` makes the parser from the fields, and the dataclass from the
parsed arguments; the dataclass refuses a value outside its range.
"""

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatron_lancet.errors import UsageError
from megatron_lancet.feature import Feature
from megatron_lancet.flags import CheckedFlags, Flag, flag, flags_of, word_or_path, words
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.plan import ChunkDim, Dispatch, DwPolicy, OverlapRange
from megatron_lancet.units import mb_to_bytes

FLAGS_VARIABLE = "LANCET_FLAGS"
"""Environment variable with ``--lancet-*`` flags, for launchers whose parsers do not accept them."""
OWN_SPEC = ("megatron_lancet.training.spec", "overlapped_gpt")
"""Value of Megatron's ``--spec`` that selects the overlapping block."""


class PlanChoice(StrEnum):
    """Source of the plan, other than a file."""

    OFF = "off"
    """No plan: stock Megatron modules."""
    AUTO = "auto"
    """Found while training, or fixed by other flags."""


class AttentionChoice(StrEnum):
    """Core attention of the overlapping block."""

    AUTO = "auto"
    """Megatron's, where it supports what the run needs; else torch's. Tuning may choose torch's if it is faster."""
    STOCK = "stock"
    """Megatron's."""
    SDPA = "sdpa"
    """torch's fused kernel."""


def _folder(text: str) -> Path:
    if not text:
        raise UsageError('--lancet-report expects a folder, got "". Name a folder, or drop the flag.')
    return Path(text)


@dataclass(frozen=True)
class LancetConfig(CheckedFlags):
    """The settings of a run. Each field is a flag, whose help explains it.

    A field that is None leaves the choice to the plan, or switches its feature off.

    Raises:
        UsageError: a value is outside the range of its flag.
    """

    plan: PlanChoice | Path = flag(
        PlanChoice.AUTO,
        read=word_or_path(PlanChoice),
        metavar="{auto,off,FILE}",
        unchecked="",
        help="auto (default): measure the first steps, find the fastest plan and switch to it; with "
        "--lancet-num-chunks use a fixed plan. off: stock Megatron modules. FILE: a plan file that "
        "lancet plan make made for this model and layout.",
    )
    num_chunks: int | None = flag(
        None,
        parsed_as=int,
        at_least=1,
        limits_plan=True,
        metavar="K",
        help="cut each micro-batch into K chunks; 1 does not cut it. Default: the plan chooses.",
    )
    chunk_dim: ChunkDim | None = flag(
        None,
        **words(ChunkDim, none_word="auto"),
        limits_plan=True,
        help="dimension along which micro-batches are cut: batch, sequence (a chunk attends to the keys and values of "
        "earlier chunks, so a micro-batch of 1 can be cut), or auto (default): the plan chooses; a fixed plan uses "
        "batch if there are enough samples.",
    )
    range: OverlapRange | None = flag(
        None,
        **words(OverlapRange),
        limits_plan=True,
        help="ops that run chunk by chunk: experts (dispatch to combine), gate (router to combine), stack (all "
        "layers with attention, without a wait at the end of a layer). Default: the plan chooses; a fixed plan "
        "uses stack.",
    )
    dispatch: Dispatch | None = flag(
        None,
        **words(Dispatch, none_word="auto"),
        limits_plan=True,
        help="rows of a dispatch. "
        f"{'. '.join(f'{one}: {one.rows}' for one in Dispatch.known().values())}. auto (default): the plan "
        f"chooses; a fixed plan uses {PLAIN}. With --moe-token-dispatcher-type flex, auto means another dispatch than "
        f"{PLAIN} if one is possible.",
    )
    attention: AttentionChoice = flag(
        AttentionChoice.AUTO,
        **words(AttentionChoice),
        help="core attention: stock (Megatron's), sdpa (torch's fused kernel), auto (default): stock, except where "
        "sequence chunks, context parallelism, sequences of unequal lengths or multi-latent attention need sdpa; "
        "--lancet-plan auto may also choose sdpa if it is faster. Also applies with --lancet-plan off.",
    )
    dw_policy: DwPolicy | None = flag(
        None,
        **words(DwPolicy),
        limits_plan=True,
        help="weight gradients: fill runs them while a backward all-to-all is in flight, none runs them immediately. "
        "Default: the plan chooses; a fixed plan uses fill.",
    )
    dw_memory_mb: float | None = flag(
        None,
        parsed_as=float,
        above=0,
        unit="MB",
        limits_plan=True,
        metavar="MB",
        advice="To run weight gradients immediately pass --lancet-dw-policy none; without the flag their memory is not "
        "bounded.",
        help="bound on the memory of deferred weight gradients on a rank (10^6 bytes); at the bound the oldest "
        "run first. Default: only the plan's window bounds it.",
    )
    report_dir: Path | None = flag(
        None,
        name="--lancet-report",
        read=_folder,
        metavar="DIR",
        unchecked="",
        help="write the report (report.json), the plan, the profile and the timeline of a step (timeline.html, "
        "trace.json) to DIR.",
    )

    verbose: bool = flag(
        False,
        parsed_as=bool,
        unchecked="",
        not_with_spec=": Megatron's own script always prints its arguments.",
        help="also print all of Megatron's arguments, some 850 lines, before the run.",
    )

    features: tuple[Feature, ...] = field(default=(), compare=False)
    """Optional features of the run."""
    settings: Mapping[type[CheckedFlags], CheckedFlags] = field(default_factory=dict)
    """Flags of these features."""

    def of[Settings: CheckedFlags](self, kind: type[Settings]) -> Settings:
        """The flags of a feature; their defaults in a run without it."""
        found = self.settings.get(kind)
        return found if isinstance(found, kind) else kind()

    @property
    def dw_memory_bytes(self) -> int | None:
        """Bytes that deferred weight gradients may keep alive on a rank; None for no bound."""
        return None if self.dw_memory_mb is None else mb_to_bytes(self.dw_memory_mb)

    @property
    def asks_for_chunks(self) -> bool:
        """Whether the user says how micro-batches are cut, or that they are not."""
        return (self.num_chunks, self.chunk_dim, self.range) != (None, None, None)

    def explicit_plan_flags(self) -> dict[str, object]:
        """The flags by which the user limits the plan, with their values."""
        values = {name: value for name, _, its, value in self.entries() if its.limits_plan}
        return {name: value for name, value in values.items() if value is not None}

    def same_on_all_ranks(self) -> dict[str, object]:
        """The values, by field, without which ranks would wait for each other forever if they differed."""
        return {entry.name: value for _, entry, its, value in self.entries() if its.same_on_all_ranks}

    def entries(self) -> "Iterator[tuple[str, Field[Any], Flag, Any]]":
        """Yields name, field, flag and value of every flag, also of features."""
        for one in (self, *self.settings.values()):
            for name, entry, its in flags_of(type(one)):
                yield name, entry, its, getattr(one, entry.name)
