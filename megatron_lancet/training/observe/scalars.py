"""Writes figures of each step to TensorBoard, next to Megatron's own."""

from typing import Protocol

from megatron_lancet.report.summary import StepRecord

PREFIX = "lancet/"
_TIMES = ("all_to_all_ms", "exposed_ms", "counts_exposed_ms")
_DW_FIGURES = ("num_dw_in_gaps", "num_dw_early", "num_dw_late", "peak_dw_bytes")


class ScalarWriter(Protocol):
    """The method of ``torch.utils.tensorboard.SummaryWriter`` that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...


def write_scalars(writer: ScalarWriter | None, iteration: int, record: StepRecord) -> None:
    """Write a step's figures of this rank under ``lancet/``.

    Args:
        writer: Megatron's writer on the last rank. None on others and in runs without ``--tensorboard-dir``: nothing is
            written.
        iteration: training step from 1, as in Megatron's scalars.
    """
    if writer is None:
        return
    writer.add_scalar(f"{PREFIX}step_ms", record.step_ms, iteration)
    writer.add_scalar(f"{PREFIX}tokens_per_s", record.num_tokens / record.step_ms * 1e3, iteration)
    for name in _TIMES + _DW_FIGURES:
        writer.add_scalar(PREFIX + name, getattr(record.comm, name), iteration)
