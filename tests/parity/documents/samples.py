"""Packed samples for stock, as a mask and positions, and for our layers, as documents."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

VOCAB = 64


def micro_batches(
    samples: Sequence[Sequence[int]], seed: int, number: int
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Random tokens of packed samples, with positions that restart, and the number of each token's document.

    Args:
        samples: lengths of the documents of each sample.

    Yields:
        Inputs of Megatron's model, and documents [B, S].
    """
    generator = torch.Generator().manual_seed(seed)
    documents = torch.stack([torch.arange(len(one)).repeat_interleave(torch.tensor(one)) for one in samples])
    positions = torch.stack([torch.cat([torch.arange(length) for length in one]) for one in samples])
    is_last = torch.stack([torch.cat([torch.arange(length) == length - 1 for length in one]) for one in samples])
    for _ in range(number):
        tokens = torch.randint(VOCAB, (len(samples), sum(samples[0]) + 1), generator=generator)
        batch = {
            "input_ids": tokens[:, :-1],
            "position_ids": positions,
            "labels": tokens[:, 1:],
            "loss_mask": (~is_last).float(),
        }
        yield batch, documents


def mask_of(documents: torch.Tensor) -> torch.Tensor:
    """[B, 1, S, S], True where attention is not allowed: to later positions and to other documents."""
    num_positions = documents.size(1)
    causal = torch.ones(num_positions, num_positions, dtype=torch.bool).tril()
    return ~(causal & (documents[:, :, None] == documents[:, None, :]))[:, None]


def params_of(samples: Sequence[Sequence[int]], per_document: bool = False) -> Any:
    """Megatron's ``PackedSeqParams`` of the samples.

    Args:
        per_document: whether a document is a sequence of the balancing loss.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [length for one in samples for length in one]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        tokens_per_sample=None if per_document else sum(samples[0]),
    )
