"""pretrain_gpt_moe.py on samples of documents that have another number of positions each, and its exact losses.

LANCET_TEST_RESULT names the file; the last rank writes it.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_lancet.patching import around, replaced
from tests.data import VOCAB_SIZE
from tests.ranks.pretrain_worker import recording

NUM_SAMPLES = 100


class SamplesOfManySizes(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of 8, 12, ... positions; sample ``i`` depends on ``i`` alone."""

    def __init__(self, num_samples: int, most_positions: int) -> None:
        self._num_samples, self._most_positions = num_samples, most_positions

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = np.random.default_rng(index)
        size = 4 * int(random.integers(2, self._most_positions // 4, endpoint=True))
        tokens = torch.from_numpy(random.integers(VOCAB_SIZE - 1, size=size + 1))
        bounds = [0, *sorted(random.choice(range(1, size), 3, replace=False)), size]
        positions = [position for length in np.diff(bounds) for position in range(length)]
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(size),
            "position_ids": torch.tensor(positions),
            "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
        }


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, None, None]:
    from megatron.training import get_args

    # The checkpoint's step took as many as a step of its own batch size.
    return SamplesOfManySizes(NUM_SAMPLES, get_args().seq_length), None, None


build_datasets.is_distributed = True


def main() -> None:
    from megatron.training import training

    from megatron_lancet.features.documents.feature import DocumentsFeature
    from megatron_lancet.registry import features
    from megatron_lancet.training import job
    from megatron_lancet.training.platform.detect import platform
    from megatron_lancet.training.process.exit import RankStatus

    losses: list[dict[str, float]] = []
    with (
        replaced(DocumentsFeature, "shapes_vary", lambda *_: True),
        around(training, "train_step", recording(losses, set())),
        platform() as found,
    ):
        job.run_job(found.device, RankStatus(), build_datasets, features=features())
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        Path(os.environ["LANCET_TEST_RESULT"]).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
