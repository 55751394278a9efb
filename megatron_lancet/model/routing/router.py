"""Routing of chunks with the statistics of the full micro-batch.

Top-k routing looks at one token at a time, so chunks are routed like the micro-batch. The balancing losses do not: they
are products of sums over all tokens of the micro-batch. So each chunk's logits are kept until the last chunk arrives,
and Megatron's own loss functions then see exactly the tensors that they see without chunks: once per micro-batch,
tokens in the same order, logged once. If Megatron passes a padding mask, they exclude padding.

Legend of shapes: S sequence length, B micro-batch size, s / b the same of a chunk, T = S * B, t = s * b, E experts, H
hidden.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import (
    compute_routing_scores_for_aux_loss,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter

from megatron_lancet.errors import UsageError
from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.samples import Documents


class _ContiguousGrad(torch.autograd.Function):
    """Identity whose backward returns a contiguous gradient, as Megatron's gating needs it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.contiguous()


class ChunkedTopKRouter(TopKRouter):
    """Megatron's top-k router, also for one chunk of a micro-batch at a time.

    Attributes:
        earlier: logits and padding masks of the micro-batch's chunks so far.
        local_experts: numbers of the experts of this rank, in order; None where they are Megatron's.
    """

    earlier: list[tuple[torch.Tensor, torch.Tensor | None]]
    _documents: Documents | None = None

    @property
    def local_experts(self) -> Sequence[int] | None:
        return None

    def begin_micro_batch(self, documents: Documents | None = None) -> None:
        """Drops logits of the last micro-batch, which remain only if its forward pass failed.

        Args:
            documents: the documents of the micro-batch; None where a sample is one.
        """
        self.earlier = []
        self._documents = documents

    def forward(
        self, input: torch.Tensor, padding_mask: torch.Tensor | None = None, chunk: Chunk | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes the tokens of a chunk; without ``chunk`` as Megatron routes an unchunked micro-batch.

        Args:
            input: [s, b, H].

        Returns:
            Probabilities [t, E] and routing map [t, E] (bool). The balancing losses of the micro-batch are attached to
            the last chunk's probabilities.
        """
        if chunk is None:
            return super().forward(input, padding_mask)
        assert padding_mask is None, "each chunk has its own mask"
        if chunk.num_chunks == 1:
            return super().forward(input, chunk.padding_mask)
        self._maintain_float32_expert_bias()
        logits_sbE = _ContiguousGrad.apply(self.gating(input))
        if not chunk.is_last:
            self.earlier.append((logits_sbE, chunk.padding_mask))
            probs, routing_map = self._route_tokens(logits_sbE)
        else:
            probs, routing_map = self._route_last_chunk(logits_sbE, chunk)
        self._apply_expert_bias(routing_map, _flat(chunk.padding_mask))
        return probs, routing_map

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Returns Megatron's logits [s, b, E]; their gradient is contiguous if Transformer Engine's GEMM reads it.

        The GEMM ignores strides. With sinkhorn and without fused permutation, Megatron gives it a transposed gradient.
        """
        logits = super().gating(input)
        return logits if moe_utils.te_general_gemm is None else _ContiguousGrad.apply(logits)

    def _apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Attaches Megatron's balancing loss of sequences, or of documents where each is one."""
        coeff = self.get_aux_loss_coeff("seq_aux_loss")
        if coeff == 0 or self._documents is None or not self._documents.are_sequences:
            inputs = probs, scores_for_aux_loss, routing_map, seq_length, bsz, with_padding_mask
            return super()._apply_seq_aux_loss(*inputs)
        if with_padding_mask:
            raise UsageError(
                "--moe-router-load-balancing-type seq_aux_loss of documents does not work with a padding_mask: the "
                "loss counts all tokens of each document. Drop the mask, or pass aux_loss."
            )
        loss = self._documents.balancing_loss(scores_for_aux_loss, routing_map, self.config, self.tp_cp_group, coeff)
        return self.attach_and_log_load_balancing_loss(
            probs, coeff, loss, "seq_load_balancing_loss", self.tp_cp_group, valid_token_count=len(scores_for_aux_loss)
        )

    def _route_tokens(self, logits_sbE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return topk_routing_with_score_function(
            logits_sbE.reshape(-1, self.config.num_moe_experts),
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            num_groups=self.config.moe_router_num_groups,
            group_topk=self.config.moe_router_group_topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            fused=self.config.moe_router_fusion,
            router_replay=self.router_replay,
        )

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Counts the tokens of each expert.

        Args:
            routing_map: [t, E] bool.
            padding_mask: [t], True for tokens to exclude. Megatron's own method needs a second dimension to combine it
                with the map.
        """
        super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask.unsqueeze(-1))

    def _route_last_chunk(self, logits_sbE: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes the chunk that completes the micro-batch and attaches the micro-batch's losses to it."""
        logits, masks = zip(*self.earlier, (logits_sbE, chunk.padding_mask), strict=True)
        self.earlier = []
        all_SBE = torch.cat(logits, dim=chunk.dim)
        padding_T = None if chunk.padding_mask is None else torch.cat(masks, dim=chunk.dim).reshape(-1)
        seq_length, micro_batch_size, num_experts = all_SBE.shape
        all_TE = self.apply_z_loss(all_SBE.view(-1, num_experts), padding_T)
        all_SBE = all_TE.view(seq_length, micro_batch_size, num_experts)
        own_size = logits_sbE.size(chunk.dim)
        own_sbE = all_SBE.narrow(chunk.dim, all_SBE.size(chunk.dim) - own_size, own_size)
        probs, routing_map = self._route_tokens(own_sbE)
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            map_TE, scores_TE = compute_routing_scores_for_aux_loss(
                all_TE, self.topk, self.score_function, fused=self.config.moe_router_fusion, padding_mask=padding_T
            )
            with_padding = padding_T is not None
            probs = self._apply_aux_loss(probs, scores_TE, map_TE, with_padding)
            probs = self._apply_seq_aux_loss(probs, scores_TE, map_TE, seq_length, micro_batch_size, with_padding)
            probs = self._apply_global_aux_loss(probs, scores_TE, map_TE, with_padding)
        return probs, routing_map


def _flat(padding_mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if padding_mask is None else padding_mask.reshape(-1)
