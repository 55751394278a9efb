"""What a user asks of Megatron-Lancet, beside Megatron's own arguments."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange
from megatron_lancet.schedule.reductions import DEFAULT_CHUNK_MB, CommPriority

DEFAULT_TUNE_STEPS = 10
"""Their median is known to 0.4 standard deviations of a step."""


class PlanChoice(StrEnum):
    """Where the plan comes from."""

    OFF = "off"
    """No plan: stock Megatron modules."""
    AUTO = "auto"
    """Chosen by us."""


class AttentionChoice(StrEnum):
    """Which core attention the overlapping block runs."""

    AUTO = "auto"
    """Megatron's, bit for bit, where it can do what the plan needs; else the fused kernel."""
    STOCK = "stock"
    """Megatron's."""
    SDPA = "sdpa"
    """torch's fused kernel."""


@dataclass(frozen=True)
class LancetConfig:
    """The ``--lancet-*`` arguments.

    Attributes:
        plan: where the plan comes from, or a plan file. Default auto.
        num_chunks: chunks per micro-batch, at least 1; None leaves it to the plan. Default None.
        chunk_dim: dimension along which micro-batches are cut; None leaves it to the plan. Default None.
        range: part of the model that runs chunk by chunk; None leaves it to the plan. Default None.
        attention: core attention. Default auto.
        dw_policy: what happens to weight gradients; None leaves it to the plan. Default None.
        dw_memory_mb: MB (10^6 bytes) that deferred weight gradients may keep alive on a rank, above 0; None for no
            bound other than the plan's window. Default None.
        report_dir: folder for report.json; None writes no file. Default None.
        tune_steps: training steps that automatic tuning measures at a time, at least 1. Default 10.
        cache_dir: folder where measured profiles are kept for later runs; None keeps none.
        comm_priority: who gets the wire, gradient reductions or all-to-alls. Default off: whoever comes.
        grad_chunk_mb: with a priority, MB (10^6 bytes) of gradients that one collective reduces at most, above 0.
        experts_apart: with expert-parallel size 1, experts' optimizer state is kept apart, as with larger sizes.
        profile: file for a profile of the first steps, after which the run ends; None trains. Default None.
    """

    plan: PlanChoice | Path = PlanChoice.AUTO
    num_chunks: int | None = None
    chunk_dim: ChunkDim | None = None
    range: OverlapRange | None = None
    attention: AttentionChoice = AttentionChoice.AUTO
    dw_policy: DwPolicy | None = None
    dw_memory_mb: float | None = None
    report_dir: Path | None = None
    tune_steps: int = DEFAULT_TUNE_STEPS
    cache_dir: Path | None = None
    profile: Path | None = None
    comm_priority: CommPriority = CommPriority.OFF
    grad_chunk_mb: float = DEFAULT_CHUNK_MB
    experts_apart: bool = False
