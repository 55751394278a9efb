"""The model of a checkpoint as a Hugging Face folder, for ``lancet export-hf``."""

import argparse
from pathlib import Path
from typing import Any

from megatron.core.utils import unwrap_model

from megatron_lancet.errors import UsageError
from megatron_lancet.features.hugging_face import model
from megatron_lancet.features.hugging_face.folders import check_writable, save
from megatron_lancet.features.hugging_face.source import CONFIG, source_of


class Export:
    """Writes models to a folder."""

    def __init__(self, folder: str, target: Path) -> None:
        """
        Args:
            folder: the Hugging Face folder that the training started from.
            target: the folder to write.

        Raises:
            UsageError: Bridge can't read the folder, or ``target`` can't be written.
        """
        check_writable(target.parent)
        self._source, self._target = source_of(folder), target

    def check(self, args: argparse.Namespace) -> None:
        """
        Args:
            args: Megatron's arguments in the checkpoint.

        Raises:
            UsageError: the checkpoint is of another model, or has parts that are not loaded.
        """
        for name, expected, found in model.contradictions(self._source, args):
            raise UsageError(
                f"expected a checkpoint with {name} {expected}, as {self._source.folder / CONFIG} says, found {found}. "
                "Name the folder from which the training started."
            )
        if self._source.provider.mtp_num_layers:
            raise UsageError(
                "expected a model without predictions of further tokens (num_nextn_predict_layers), which are not "
                "loaded. Run the training's command with --load, --lancet-save-hf and no step left to do."
            )

    def write(self, module: Any) -> None:
        """Writes a model with the checkpoint's weights. Collective over all ranks.

        Raises:
            CheckpointError: it could not be written.
        """
        save(self._source, [unwrap_model(module)], self._target)
