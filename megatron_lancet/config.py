"""The ``--lancet-*`` flags: name, values, default, help, unit and range of each.

A flag is a field of a dataclass. ``training/arguments.py`` makes the parser from the fields, and the dataclass from the
parsed arguments; the dataclass refuses a value outside its range.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from megatron_lancet.errors import UsageError
from megatron_lancet.feature import Feature
from megatron_lancet.flags import CheckedFlags, flag, flags_of, word_or_path, words
from megatron_lancet.schedule.plan import ChunkDim, Dispatch, DwPolicy, OverlapRange
from megatron_lancet.schedule.reductions import DEFAULT_CHUNK_MB, CommPriority
from megatron_lancet.schedule.units import mb_to_bytes
from megatron_lancet.schedule.wire import Wire


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


class RowLimitChoice(StrEnum):
    """Source of the most rows that a rank may receive of a chunk, other than a number."""

    AUTO = "auto"
    """What fits into the memory that the first steps leave."""


class CacheChoice(StrEnum):
    """Where measured profiles are kept, other than in a folder that the user names."""

    OFF = "off"
    """Profiles are not kept."""
    AUTO = "auto"
    """The user's cache folder."""


def _row_limit(text: str) -> "int | RowLimitChoice":
    """
    Raises:
        UsageError: the text is neither a word nor a number above 0.
    """
    if text in list(RowLimitChoice):
        return RowLimitChoice(text)
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(
            f"--lancet-max-received-rows expects auto, or a number of rows above 0, got {text}. Without the flag there "
            "is no bound."
        )
    return int(text)


def _tiles(text: str) -> int:
    """
    Raises:
        UsageError: the text is no number of at least 0.
    """
    if not text.isdecimal():
        raise UsageError(f"--lancet-tiles expects auto, or a number of tiles, 0 for none, got {text}.")
    return int(text)


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
        help="auto (default): measures the first steps, finds the fastest plan and switches to it; with "
        "--lancet-num-chunks a fixed plan instead. off: stock Megatron modules. FILE: a plan file of "
        "tools/make_plan.py that was made for this model and layout.",
    )
    num_chunks: int | None = flag(
        None,
        parsed_as=int,
        at_least=1,
        limits_plan=True,
        metavar="K",
        help="cut each micro-batch into K chunks; by default the plan chooses. 1 leaves it whole.",
    )
    chunk_dim: ChunkDim | None = flag(
        None,
        **words(ChunkDim, none_word="auto"),
        limits_plan=True,
        help="dimension along which micro-batches are cut: batch, sequence (chunks attend to the keys and values of "
        "earlier ones: also a micro-batch of 1 can be cut), or auto (default): the plan chooses; a fixed plan takes "
        "batch where it has enough samples.",
    )
    range: OverlapRange | None = flag(
        None,
        **words(OverlapRange),
        limits_plan=True,
        help="what runs chunk by chunk: experts (dispatch to combine), gate (router to combine), stack (all "
        "layers with their attention, without waiting at a layer's end). By default the plan chooses; a fixed plan "
        "takes stack.",
    )
    pairing: PairingChoice | None = flag(
        None,
        **words(PairingChoice, none_word="auto"),
        limits_plan=True,
        help="with gradient accumulation, run the backward of each micro-batch beside the forward of the next one, so "
        "that the messages of one are in flight while the other computes; needs no chunks. auto (default): the plan "
        "chooses; a fixed plan pairs where --overlap-moe-expert-parallel-comm is given and pairing is possible.",
    )
    dispatch: Dispatch | None = flag(
        None,
        **words(Dispatch, none_word="auto"),
        limits_plan=True,
        help="rows that all-to-alls carry: plain (one per token and chosen expert, as stock), dedup (one per token and "
        "rank that holds any of its experts: fewer bytes where a rank holds several), two-hop (one per token and node, "
        "and from there one per token and rank: fewer bytes between nodes), auto (default): the plan chooses; a fixed "
        "plan takes plain. With --moe-token-dispatcher-type flex auto means two-hop or dedup, where they are possible.",
    )
    tiles: int | None = flag(
        None,
        read=_tiles,
        none_word="auto",
        limits_plan=True,
        metavar="{auto,N}",
        help="send the rows of a chunk to other ranks in N tiles, each a message of its own: the experts work on the "
        "rows that stay and on the first tile while others are on the way, and outputs go back tile by tile. 0: one "
        "message of all rows. auto (default): the plan chooses, for whole micro-batches; a fixed plan has none.",
    )
    ranks_per_node: int | None = flag(
        None,
        parsed_as=int,
        at_least=1,
        metavar="N",
        advice="Without the flag the launcher says it.",
        unchecked="",
        help="ranks of each node, for --lancet-dispatch two-hop: ranks 0 to N-1 share a node, then the next N. By "
        "default what the launcher says (LOCAL_WORLD_SIZE of torchrun, or SLURM's tasks per node); in a mocked world "
        "and in a dry run unknown.",
    )
    attention: AttentionChoice = flag(
        AttentionChoice.AUTO,
        **words(AttentionChoice),
        help="core attention: stock (Megatron's), sdpa (torch's fused kernel), auto (default): stock unless sequence "
        "chunks, context parallelism or multi-latent attention need sdpa. Also applies with --lancet-plan off.",
    )
    dw_policy: DwPolicy | None = flag(
        None,
        **words(DwPolicy),
        limits_plan=True,
        help="weight gradients: fill runs them while a backward all-to-all is in flight, none at once. By default the "
        "plan chooses; a fixed plan fills.",
    )
    dw_memory_mb: float | None = flag(
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
    comm_priority: CommPriority = flag(
        CommPriority.OFF,
        **words(CommPriority),
        help="all-to-all-first cuts gradient reductions into parts that run only where no all-to-all of the backward "
        "pass is in flight or about to start; needs --overlap-grad-reduce. off (default): Megatron reduces each bucket "
        "as soon as it is complete.",
    )
    grad_chunk_mb: float = flag(
        DEFAULT_CHUNK_MB,
        parsed_as=float,
        above=0,
        unit="MB",
        metavar="MB",
        advice="To reduce whole buckets pass --lancet-comm-priority off.",
        help="with --lancet-comm-priority, gradients (10^6 bytes) in one such part, and at one place between two "
        "all-to-alls, at most (default: {default:g}).",
    )
    comm_sms: int | None = flag(
        None,
        parsed_as=int,
        at_least=1,
        metavar="N",
        advice="Without the flag NCCL chooses.",
        unchecked="",
        help="streaming multiprocessors (SMs) of a GPU that an all-to-all of expert parallelism may take from the "
        "kernels beside it, at most; a power of two. By default NCCL chooses.",
    )
    wire: Wire = flag(
        Wire.EXACT,
        **words(Wire),
        unchecked="",
        help="number format of hidden states in the all-to-alls of expert parallelism. exact (default): the type of "
        "the hidden states. fp8: 8 bits, with a scale for each 128, in forward dispatches, and bf16 in combines and "
        "gradients; it changes losses and gradients, and auto never chooses it.",
    )
    max_received_rows: int | RowLimitChoice | None = flag(
        None,
        read=_row_limit,
        metavar="{auto,N}",
        help="guard against running out of memory when a router prefers some experts: the experts of a rank work on at "
        "most N rows of a chunk at a time (a row is a token and one of its experts). Where a rank would receive more, "
        "all ranks send the chunk in several rounds; no token is dropped and no step repeated. auto: as many rows as "
        "fit into the memory that the first steps under the plan leave. By default there is no bound.",
    )
    experts_apart: bool = flag(
        False,
        parsed_as=bool,
        help="with --expert-model-parallel-size 1, keep experts' gradients and optimizer state apart from dense "
        "weights', as with larger sizes: a run may then go on from a checkpoint with the other size, and back.",
    )
    expert_placement: Path | None = flag(
        None,
        read=Path,
        metavar="FILE",
        unchecked="",
        help="put experts on the ranks that FILE says, a placement of tools/place_experts.py. Losses, logs and "
        "checkpoints keep the model's numbers of experts.",
    )
    rebalance_interval: int | None = flag(
        None,
        parsed_as=int,
        at_least=2,
        metavar="N",
        advice="Without the flag experts stay where they are.",
        unchecked="",
        help="let experts change their ranks after every N steps, where the load of these steps says that it pays: "
        "weights and optimizer state move from rank to rank.",
    )
    report_dir: Path | None = flag(
        None,
        name="--lancet-report",
        read=Path,
        metavar="DIR",
        unchecked="",
        help="also write the closing report to DIR/report.json, and beside it the plan, the profile and the timeline "
        "of a step (timeline.html, trace.json).",
    )
    # The standard error of the median of ten steps is 0.4 standard deviations of a step.
    tune_steps: int = flag(
        10,
        parsed_as=int,
        at_least=1,
        metavar="N",
        help="training steps that auto measures at a time, before and after a change of plan (default: {default}).",
    )
    cache: CacheChoice | Path = flag(
        CacheChoice.AUTO,
        read=word_or_path(CacheChoice),
        metavar="DIR",
        unchecked="",
        help="where auto keeps measured profiles, so that later runs of the same model on the same device need not "
        "measure again; off keeps none. Default: megatron-lancet in $XDG_CACHE_HOME or ~/.cache.",
    )
    profile: Path | None = flag(
        None,
        read=Path,
        metavar="FILE",
        unchecked="",
        help="measure ops, links and memory in the first steps, write them to FILE (JSON) and end; "
        "tools/profile_model.py sets it.",
    )

    features: tuple[Feature, ...] = field(default=(), compare=False)
    """Optional features that the run knows."""
    settings: Mapping[type[CheckedFlags], CheckedFlags] = field(default_factory=dict)
    """Flags of these features."""

    def of[Settings: CheckedFlags](self, kind: type[Settings]) -> Settings:
        """The flags of a feature; their defaults in a run that does not know it."""
        found = self.settings.get(kind)
        return found if isinstance(found, kind) else kind()

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

    @property
    def places_experts(self) -> bool:
        """Whether experts may be on other ranks than Megatron's."""
        return self.expert_placement is not None or self.rebalance_interval is not None

    def explicit_plan_flags(self) -> dict[str, object]:
        """The flags by which the user limits the plan, with their values."""
        values = {name: getattr(self, entry.name) for name, entry, its in flags_of(LancetConfig) if its.limits_plan}
        return {name: value for name, value in values.items() if value is not None}

    def unchecked_flags(self) -> dict[str, str]:
        """The flags that a check on a few CPU ranks leaves out, each with what the check does not cover for it."""
        kinds = (LancetConfig, DryRunConfig, *self.settings)
        flags = [(name, its) for kind in kinds for name, _, its in flags_of(kind)]
        return {name: its.unchecked for name, its in flags if its.unchecked is not None}


@dataclass(frozen=True)
class DryRunConfig(CheckedFlags):
    """Whether the run only validates its command line, and for how many ranks.

    Raises:
        UsageError: a value is outside the range of its flag, or a world size is given to a run that is no dry run.
    """

    dry_run: bool = flag(
        False,
        parsed_as=bool,
        unchecked="",
        help="parse and validate everything as for a cluster with GPUs, print model size, parallel layout, memory per "
        "GPU and plan, and end: one process, no GPU, no data needed. Files and packages that are missing here are "
        "warnings; what the run itself would refuse is an error.",
    )
    world_size: int | None = flag(
        None,
        parsed_as=int,
        at_least=1,
        metavar="N",
        unchecked="",
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
