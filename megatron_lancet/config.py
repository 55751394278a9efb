"""What a user asks of Megatron-Lancet, beside Megatron's own arguments."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange


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
        plan: where the plan comes from. Default auto.
        num_chunks: chunks per micro-batch, at least 1; None leaves it to the plan. Default None.
        chunk_dim: dimension along which micro-batches are cut; None leaves it to the plan. Default None.
        range: part of the model that runs chunk by chunk. Default stack.
        attention: core attention. Default auto.
        dw_policy: what happens to weight gradients. Default fill.
        dw_memory_mb: MB (10^6 bytes) that deferred weight gradients may keep alive on a rank, above 0; None for no
            bound other than the plan's window. Default None.
        report_dir: folder for report.json; None writes no file. Default None.
    """

    plan: PlanChoice = PlanChoice.AUTO
    num_chunks: int | None = None
    chunk_dim: ChunkDim | None = None
    range: OverlapRange = OverlapRange.STACK
    attention: AttentionChoice = AttentionChoice.AUTO
    dw_policy: DwPolicy = DwPolicy.FILL
    dw_memory_mb: float | None = None
    report_dir: Path | None = None
