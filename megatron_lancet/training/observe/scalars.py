"""Writes figures of each step to TensorBoard, beside Megatron's own."""

from typing import Protocol

from megatron_lancet.report.summary import StepRecord

PREFIX = "lancet/"


class ScalarWriter(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...


def write_scalars(writer: ScalarWriter | None, iteration: int, record: StepRecord) -> None:
    """Write a step's figures of this rank under ``lancet/``; Megatron's last rank is the one that writes.

    Args:
        writer: Megatron's. None on other ranks and in runs without ``--tensorboard-dir``: nothing is written.
        iteration: training step from 1, as in Megatron's scalars.
        record: the step's figures.
    """
    if writer is None:
        return
    comm = record.comm
    figures = {
        "step_ms": record.step_ms,
        "tokens_per_s": record.num_tokens / record.step_ms * 1e3,
        "all_to_all_ms": comm.all_to_all_ms,
        "exposed_ms": comm.exposed_ms,
        "counts_exposed_ms": comm.counts_exposed_ms,
        "num_dw_hidden": comm.num_dw_hidden,
        "num_dw_early": comm.num_dw_early,
        "num_dw_late": comm.num_dw_late,
        "peak_dw_bytes": comm.peak_dw_bytes,
    }
    for name, value in figures.items():
        writer.add_scalar(PREFIX + name, value, iteration)
