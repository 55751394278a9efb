"""From a user's arguments to a model: everything is checked before process groups start and weights are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lancet.inference.checkpoint_reader import StoredRun, find_checkpoint, read_run
from megatron_lancet.inference.load import LoadedModel, check_ranks, loaded_model, number_of_ranks, tokenizer_of
from megatron_lancet.training.platform.detect import platform


@dataclass(frozen=True)
class Session:
    """A checkpoint without its weights, and the tokenizer that it was trained with."""

    run: StoredRun
    tokenizer: Any

    @staticmethod
    def open(load: Path, step: int | None = None, tokenizer_model: Path | None = None) -> "Session":
        """Read all of a checkpoint but its weights.

        Args:
            load: folder that training saved to.
            step: step of the checkpoint; None takes the latest.
            tokenizer_model: present path of the tokenizer's file; None takes the path that the checkpoint names.

        Raises:
            UsageError: there is no such checkpoint, it is damaged, or it does not fit the ranks or the tokenizer.
        """
        run = read_run(find_checkpoint(load, step))
        check_ranks(run, number_of_ranks())
        return Session(run, tokenizer_of(run, tokenizer_model))

    @property
    def context_length(self) -> int:
        """Number of tokens that the model was trained to see at once."""
        return int(self.run.arguments.seq_length)

    @contextmanager
    def model(self) -> Iterator[LoadedModel]:
        """Load the model on all ranks; raises a UsageError if its weights can't be loaded."""
        with platform() as found, loaded_model(self.run, found.device) as model:
            yield model
