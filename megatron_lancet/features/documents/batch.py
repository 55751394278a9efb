"""A micro-batch whose samples are made of documents, which do not attend to each other.

Legend of shapes: B samples, S positions of a whole sample, s those on this rank, n numbers of a sample's bounds.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_lancet.errors import UsageError

DTYPES = {"tokens": torch.int64, "position_ids": torch.int64, "labels": torch.int64, "loss_mask": torch.float32}
"""The tensors [B, S] of a batch, in the order in which they are sent."""


@dataclass
class DocumentParams(PackedSeqParams):
    """Megatron's bounds of documents.

    Attributes:
        has_fill: whether the last document only fills the sample up: it is no sequence of the balancing loss.
    """

    has_fill: bool = False


@dataclass(frozen=True)
class DocumentBatch:
    """A micro-batch of documents. Every sample is full: its documents follow each other without a gap.

    Attributes:
        tensors: [B, s] each, the :data:`DTYPES` that the pipeline stage reads. ``position_ids`` begin with 0 in
            each document, ``loss_mask`` is 1 where a token counts.
        bounds: [documents + 1] int32, where documents begin in the samples laid end to end: 0 ... B * S, no repeats. On
            the host, where the overlapping block reads them without waiting for a device.
        num_samples: B.
        num_positions: S, in all ranks of a context-parallel group together.
        longest: positions of the longest document.
        has_fill: see :class:`DocumentParams`.
    """

    tensors: Mapping[str, torch.Tensor]
    bounds: torch.Tensor
    num_samples: int
    num_positions: int
    longest: int
    has_fill: bool = False

    @classmethod
    def read(cls, sample: Mapping[str, Any], names: Collection[str]) -> "DocumentBatch":
        """The batch of a data iterator, on the host.

        Args:
            sample: tokens, labels, loss_mask and position_ids [B, S]; cu_seqlens [B, n] int32, each row from 0 to S.
                Megatron's datasets fill rows up with S, so that all have one length. May have has_fill [1].
            names: the tensors [B, S] that the pipeline stage reads.

        Raises:
            UsageError: the samples have no bounds of documents, or wrong ones.
        """
        num_samples, num_positions = sample["tokens"].shape
        bounds = sample.get("cu_seqlens")
        if bounds is None:
            raise UsageError(
                "a batch has no cu_seqlens, the bounds of its documents, which --dataloader-inter-document-masking "
                "needs. Use a data set that gives them, as Megatron's GPTDataset does, or drop the flag."
            )
        if bounds[:, 0].any() or (bounds[:, -1] != num_positions).any() or (bounds.diff() < 0).any():
            raise UsageError(
                f"cu_seqlens of each sample should rise from 0 to its {num_positions} positions, and a batch has "
                f"{bounds.tolist()}. Fix the data set that gives them."
            )
        starts = num_positions * torch.arange(num_samples, dtype=torch.int32)
        end_to_end = torch.unique_consecutive((bounds.int() + starts[:, None]).flatten())
        tensors = {name: sample[name].to(dtype).contiguous() for name, dtype in DTYPES.items() if name in names}
        has_fill = bool(sample.get("has_fill", False))
        return cls(tensors, end_to_end, num_samples, num_positions, int(end_to_end.diff().max()), has_fill)

    @property
    def on_device(self) -> "DocumentBatch":
        """The batch with its tensors [B, s] on Megatron's device."""
        return self.map(_to_device)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "DocumentBatch":
        """The batch with each of its tensors [B, s] replaced by what ``function`` makes of it."""
        return replace(self, tensors={name: function(tensor) for name, tensor in self.tensors.items()})

    @property
    def end_to_end(self) -> "DocumentBatch":
        """The samples laid end to end, [1, B * s] each: what Megatron's own layers take."""
        return self.map(lambda tensor: tensor.reshape(1, -1))

    def packed_seq_params(self, on_host: bool, by_document: bool) -> DocumentParams:
        """The bounds of documents as Megatron's models take them.

        Args:
            on_host: whether the bounds stay there; Megatron's own layers want them on its device.
            by_document: whether each document is a sequence of the routers' balancing losses; otherwise each sample is,
                as Megatron has it.
        """
        bounds = self.bounds if on_host else _to_device(self.bounds)
        return DocumentParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
            tokens_per_sample=None if by_document else self.num_positions,
            has_fill=self.has_fill,
        )


def _to_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cuda(non_blocking=True)
