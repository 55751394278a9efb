"""Reads Megatron's ``PackedSeqParams`` of a micro-batch for its chunks.

Legend of shapes: S positions of a sequence, s those on this rank, B samples, H hidden size, R channels of a rotary
embedding.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig

from megatron_lancet.errors import UsageError
from megatron_lancet.features.documents.lengths import Documents
from megatron_lancet.model.attention.slices import own_positions
from megatron_lancet.planning.documents.cost import DocumentCost
from megatron_lancet.runtime.device import to_device


@dataclass(frozen=True)
class PackedMicroBatch:
    """A micro-batch of packed documents.

    Attributes:
        documents: the documents of its samples.
        positions: position of each token in its document, [s, B]; with sequence parallelism [S, B], which attention
            sees.
        is_flat: whether its hidden states came as [B * S, 1, H], sample after sample.
    """

    documents: Documents
    positions: torch.Tensor
    is_flat: bool = False

    @staticmethod
    def of(
        params: PackedSeqParams, hidden: torch.Tensor, config: TransformerConfig, cost: DocumentCost | None
    ) -> "PackedMicroBatch":
        """Reads the documents' lengths; the host waits for them if they are on a device.

        Args:
            params: with the documents of all samples, sample after sample.
            hidden: [s, B, H], or [B * S, 1, H].
            cost: see :class:`Documents`.

        Raises:
            UsageError: they are no such parameters, or don't fit ``hidden``.
        """
        _check(params)
        assert params.cu_seqlens_q is not None
        num_ranks = config.context_parallel_size
        if config.sequence_parallel:
            num_ranks *= config.tensor_model_parallel_size
        num_tokens = hidden.size(0) * hidden.size(1) * num_ranks
        own_length: int | None = getattr(params, "tokens_per_sample", None)  # megatron-core 0.18 has no such field
        length = own_length or num_tokens // hidden.size(1)
        is_flat = hidden.size(1) == 1 and length < num_tokens
        if is_flat and num_ranks > 1:
            raise UsageError(
                "the overlapping layers got the samples of a packed micro-batch end to end, [B * S, 1, H], "
                "cut over the ranks of --sequence-parallel or --context-parallel-size. Pass tokens as [B, S]."
            )
        lengths = lengths_of(params.cu_seqlens_q.tolist(), length, num_tokens)
        documents = Documents(lengths, own_length is None, cost, getattr(params, "has_fill", False))
        positions = documents.positions()
        if config.context_parallel_size > 1:
            positions = torch.cat([positions[slice(*own)] for own in own_positions(length, config)])
        return PackedMicroBatch(documents, to_device(positions, hidden.device), is_flat)

    def unflattened(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s, B, H] of what the layers got."""
        if not self.is_flat:
            return hidden
        return hidden.view(len(self.documents.lengths), -1, hidden.size(-1)).transpose(0, 1).contiguous()

    def flattened(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s, B, H] as the layers got it."""
        return hidden.transpose(0, 1).reshape(-1, 1, hidden.size(-1)) if self.is_flat else hidden

    def rotary(self, rotary_pos_emb: torch.Tensor | None) -> torch.Tensor | None:
        """The embedding of each position, [s, B, 1, R].

        Args:
            rotary_pos_emb: of positions from 0 on, [longest or more, 1, 1, R], or None.

        Raises:
            UsageError: there are too few of them.
        """
        return None if rotary_pos_emb is None else self.documents.rotary_at(rotary_pos_emb, self.positions)


def lengths_of(ends: list[int], num_positions: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Lengths of each sample's documents.

    Args:
        ends: documents' ends in all samples, sample after sample, with a 0 in front; repeated ones count once.
        num_positions: of a sample.
        num_tokens: of all samples.

    Raises:
        UsageError: they are not the documents of such samples.
    """
    ends = [end for index, end in enumerate(ends) if index == 0 or end != ends[index - 1]]
    per_sample: list[list[int]] = [[] for _ in range(num_tokens // num_positions)]
    for start, end in pairwise(ends):
        sample, last = start // num_positions, (end - 1) // num_positions
        if end < start or sample != last or last >= len(per_sample):
            break
        per_sample[sample].append(end - start)
    if ends[0] != 0 or ends[-1] != num_tokens or any(sum(lengths) != num_positions for lengths in per_sample):
        raise UsageError(
            f"the documents of a packed micro-batch end at {ends[1:]}, which does not make {len(per_sample)} samples "
            f"of {num_positions} tokens. cu_seqlens_q has the documents of all samples, sample after sample, and a "
            "sample ends with a document."
        )
    return tuple(map(tuple, per_sample))


def _check(params: PackedSeqParams) -> None:
    wrong = {
        f"qkv_format {params.qkv_format!r} (thd is known)": params.qkv_format != "thd",
        "no cu_seqlens_q": params.cu_seqlens_q is None,
        "padding between documents (cu_seqlens_*_padded)": not (
            _are_same(params.cu_seqlens_q, params.cu_seqlens_q_padded)
            and _are_same(params.cu_seqlens_q, params.cu_seqlens_kv_padded)
        ),
        "a context-parallel group of their own": params.cp_group is not None or params.local_cp_size is not None,
        "other documents for keys than for queries": not _are_same(params.cu_seqlens_q, params.cu_seqlens_kv),
    }
    found = [what for what, is_so in wrong.items() if is_so]
    if found:
        raise UsageError(
            f"the overlapping layers got packed_seq_params with {', '.join(found)}. Give them as "
            "--dataloader-inter-document-masking does, or run with --lancet-plan off."
        )


def _are_same(query_ends: torch.Tensor | None, others: torch.Tensor | None) -> bool:
    if others is None or query_ends is others:
        return True
    # Megatron, verl and NeMo-RL pass one tensor in all fields; a comparison of values would wait for the device.
    return query_ends is not None and others.equal(query_ends)
