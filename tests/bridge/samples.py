"""Samples for Megatron-Bridge's trainings: packed documents, and text with images. A sample follows from its number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.data.packing.in_batch import build_mcore_thd_sequence_batch_from_rows
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs

VOCAB, IMAGE_TOKEN = 255, 250
PATCH_VALUES, IMAGE_GRID = 3 * 2 * 4 * 4, (1, 4, 4)
"""Channels, frames, height and width of a patch; frames, rows and columns of patches, of which four make a token."""
Batch = dict[str, Any]


class Samples(torch.utils.data.Dataset[Any]):
    """Some samples of a seed, with up to ``length`` tokens and the label of the last one."""

    def __init__(self, number: int, length: int, seed: int) -> None:
        self._number, self._length, self._seed = number, length, seed

    def __len__(self) -> int:
        return self._number

    def generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self._seed + int(number))


class Documents(Samples):
    """Documents of unlike lengths; a micro-batch has them end to end in one row, as Bridge's packing makes it."""

    def __getitem__(self, number: int) -> torch.Tensor:
        generator = self.generator(number)
        length = int(torch.randint(3, self._length + 1, (), generator=generator))
        return torch.randint(VOCAB, (length + 1,), generator=generator)

    def collate_fn(self, documents: Sequence[torch.Tensor]) -> Batch:
        rows = [
            {
                "tokens": document[:-1],
                "labels": document[1:],
                "loss_mask": (document[1:] % 7 != 0).float(),
                "position_ids": torch.arange(len(document) - 1),
            }
            for document in documents
        ]
        return build_mcore_thd_sequence_batch_from_rows(rows, token_key="tokens")


class Images(Samples):
    """Texts with an image at another place in each."""

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = self.generator(number)
        tokens = torch.randint(1, IMAGE_TOKEN, (self._length + 1,), generator=generator)
        num_patches = IMAGE_GRID[0] * IMAGE_GRID[1] * IMAGE_GRID[2]
        start = int(torch.randint(1, self._length - num_patches, (), generator=generator))
        tokens[start : start + num_patches // 4] = IMAGE_TOKEN
        return tokens, torch.randn(num_patches, PATCH_VALUES, generator=generator)

    def collate_fn(self, samples: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
        texts = torch.stack([tokens for tokens, _ in samples])
        tokens, labels = texts[:, :-1].contiguous(), texts[:, 1:].contiguous()
        visual = GenericVisualInputs(
            pixel_values=torch.cat([patches for _, patches in samples]),
            image_grid_thw=torch.tensor([IMAGE_GRID] * len(samples)),
            mm_token_type_ids=(tokens == IMAGE_TOKEN).int(),
        )
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": (labels != IMAGE_TOKEN).float(),
            "position_ids": torch.arange(self._length).expand(len(samples), -1),
            "visual_inputs": visual,
        }


@dataclass
class TextsWithImages(DatasetProvider):
    """Bridge's description of :class:`Images`."""

    kind: ClassVar[type[Samples]] = Images
    seq_length: int = 32
    dataloader_type: Literal["single", "cyclic", "batch", "external"] | None = "single"
    num_workers: int = 0

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, Any, Any]:
        """Returns samples to train, validate and test with."""
        numbers = context.train_samples, context.valid_samples, context.test_samples
        train, valid, test = (self.kind(number, self.seq_length, seed) for seed, number in enumerate(numbers))
        return train, valid, test


@dataclass
class PackedDocuments(TextsWithImages):
    """Bridge's description of :class:`Documents`."""

    kind: ClassVar[type[Samples]] = Documents
    enable_in_batch_packing: bool = True
