"""Writes figures of each step to TensorBoard and to Weights & Biases, next to Megatron's own."""

from types import ModuleType
from typing import Any, Protocol

from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_lancet.report.summary import StepRecord

PREFIX = "lancet/"
MESSAGE_TIMES = ("all_to_all_ms", "exposed_ms", "counts_exposed_ms")
_DW_FIGURES = ("num_dw_in_gaps", "num_dw_early", "num_dw_late", "peak_dw_bytes")


class ScalarWriter(Protocol):
    """The methods of ``torch.utils.tensorboard.SummaryWriter`` that are used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def flush(self) -> None: ...


class _Writers:
    """Megatron's writers: a figure goes to each with the same tag."""

    def __init__(self, tensorboard: Any, wandb: ModuleType | None) -> None:
        self._tensorboard, self._wandb = tensorboard, wandb

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        if self._tensorboard is not None:
            self._tensorboard.add_scalar(tag, scalar_value, global_step)
        if self._wandb is not None and self._wandb.run is not None:  # Megatron finishes it before the run's report
            self._wandb.log({tag: scalar_value}, global_step)

    def flush(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.flush()


def megatrons_writer() -> ScalarWriter | None:
    """Writes to Megatron's writers on the last rank; None on others, and in runs with neither TensorBoard nor W&B."""
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    return None if tensorboard is None and wandb is None else _Writers(tensorboard, wandb)


def write_scalars(writer: ScalarWriter | None, iteration: int, record: StepRecord) -> None:
    """Write a step's figures of this rank under ``lancet/``.

    Args:
        writer: :func:`megatrons_writer`; None writes nothing.
        iteration: training step from 1, as in Megatron's scalars.
    """
    if writer is None:
        return
    comm, figures = record.comm, {"step_ms": record.step_ms}
    if record.num_tokens:  # else another rank of the tensor-parallel group draws documents and counts them
        figures["tokens_per_s"] = record.num_tokens / record.step_ms * 1e3
    if comm.all_to_all_ms:  # else no messages were timed
        figures["exposed_share"] = (comm.exposed_ms + comm.counts_exposed_ms) / record.step_ms
        figures |= {name: getattr(comm, name) for name in MESSAGE_TIMES}
    figures |= {name: getattr(comm, name) for name in _DW_FIGURES}
    for name, value in figures.items():
        writer.add_scalar(PREFIX + name, value, iteration)
