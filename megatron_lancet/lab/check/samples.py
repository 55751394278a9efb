"""Samples of a check: the same ones in every layout, without files."""

from typing import Any

import torch
from megatron.training import get_args

_SEED = 20_000
_SHARE_OF_FIRST_TOKENS = 0.2
"""Of all tokens in samples of documents."""


class RandomTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens; sample ``i`` depends on ``i`` and the seed alone.

    Args:
        padding: whether the ends of samples are padding, which counts neither in the loss nor in the routers' losses;
            their lengths differ.
        documents: whether samples are made of documents of random lengths, which do not attend to each other.
    """

    def __init__(
        self, num_samples: int, seq_length: int, num_tokens: int, seed: int, padding: bool, documents: bool = False
    ) -> None:
        self._num_samples, self._seq_length, self._num_tokens = num_samples, seq_length, num_tokens
        self._seed, self._padding, self._documents = seed, padding, documents

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(_SEED * self._seed + index)
        tokens = torch.randint(1, self._num_tokens, (self._seq_length + 1,), generator=generator)
        loss_mask = torch.ones(self._seq_length)
        if self._padding:
            # Between an eighth and a half: the ranks that share out a sequence have unequal parts of what is left.
            num_padded = int(torch.randint(self._seq_length // 8, self._seq_length // 2, (), generator=generator))
            loss_mask[self._seq_length - num_padded :] = 0
        seen = torch.ones(self._seq_length, self._seq_length, dtype=torch.bool).tril()
        positions = torch.arange(self._seq_length)
        starts = torch.zeros(self._seq_length, dtype=torch.bool)
        if self._documents:
            starts = torch.rand(self._seq_length, generator=generator) < _SHARE_OF_FIRST_TOKENS
        starts[0] = True
        document = starts.cumsum(0)
        bounds = torch.full((self._seq_length + 1,), self._seq_length, dtype=torch.int32)
        bounds[: document[-1]] = positions[starts]
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": loss_mask,
            "position_ids": positions - bounds[document - 1],
            "attention_mask": ~(seen & (document[:, None] == document))[None],
            "cu_seqlens": bounds,
        }


def datasets_of(seed: int, padding: bool, documents: bool) -> Any:
    """A provider of datasets for Megatron's training loop: training samples, and nothing to evaluate."""

    def build(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, None, None]:
        args = get_args()
        return RandomTokens(num_samples[0], args.seq_length, args.vocab_size, seed, padding, documents), None, None

    build.is_distributed = True  # type: ignore[attr-defined]
    return build
