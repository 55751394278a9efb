"""The contents that a trace must have, and the one message about missing ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lancet.files.reader import RecordError

FLAGS = (
    "--profile --use-pytorch-profiler --pytorch-profiler-collect-shapes --profile-step-start 5 --profile-step-end 9 "
    "--profile-ranks 0 1 --tensorboard-dir DIR"
)
"""Megatron's flags that record everything that is read; the ranks form an expert-parallel group."""


class TraceLacks(RecordError):  # noqa: N818 - the name states the problem
    """A trace lacks something that a profile needs. The message names it and what to do."""

    def __init__(self, where: str, missing: str, remedy: str = f"Record with Megatron's {FLAGS}") -> None:
        """
        Args:
            where: name of the trace.
            missing: what it lacks, as the end of a sentence.
            remedy: what to do.
        """
        super().__init__(f"{where}: the trace has {missing}. {remedy}.")


@contextmanager
def damage_refused(path: Path) -> Iterator[None]:
    """Inside, a field that is missing or of another type is reported as damage of the file.

    Raises:
        RecordError: there is one.
    """
    try:
        yield
    except RecordError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise RecordError(f"{path}: no trace of torch.profiler, or damaged: {type(error).__name__} {error}") from error
