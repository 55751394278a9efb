"""Chooses between Megatron's core attention and torch's fused kernel, and checks the choice."""

import argparse
from collections.abc import Iterator

from megatron_lancet.config import AttentionChoice, LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.model.attention.sdpa import sdpa_blockers
from megatron_lancet.training.plan.support import TRANSFORMER_ENGINE

DOCUMENTS_FLAG = "--dataloader-inter-document-masking"
"""Megatron's flag for samples of documents that do not attend to each other."""


def needs_own_attention(args: argparse.Namespace) -> str | None:
    """The flag that needs the fused kernel, because Megatron's local core attention does not support it; or None."""
    if args.transformer_impl != "local":
        return None
    if args.context_parallel_size > 1:
        return f"--context-parallel-size {args.context_parallel_size}"
    if args.dataloader_inter_document_masking:
        return DOCUMENTS_FLAG
    return "--multi-latent-attention" if args.multi_latent_attention else None


def uses_sdpa(args: argparse.Namespace, config: LancetConfig) -> bool:
    """Whether the user asks for torch's fused kernel, or for a flag that needs it; sequence chunks of local layers use
    it in any case.
    """
    return config.attention is AttentionChoice.SDPA or needs_own_attention(args) is not None


def may_use_sdpa(args: argparse.Namespace, config: LancetConfig) -> bool:
    """Whether plans without sequence chunks may have torch's fused kernel, and need not."""
    is_free = config.attention is AttentionChoice.AUTO and needs_own_attention(args) is None
    return is_free and args.transformer_impl == "local" and not sdpa_blockers(args)


def drop_masks(args: argparse.Namespace) -> Iterator[str]:
    """Lets the data loader make no masks unless they cut samples: torch's fused kernel skips the future without one."""
    if args.create_attention_mask_in_dataloader and not args.reset_attention_mask:
        args.create_attention_mask_in_dataloader = False
        yield "--no-create-attention-mask-in-dataloader is on: attention masks the future without a mask's tensor"


def check_attention(args: argparse.Namespace, config: LancetConfig) -> None:
    """Checks the core attention that the user asks for.

    Raises:
        UsageError: the model needs something that it does not support.
    """
    if args.transformer_impl == TRANSFORMER_ENGINE and config.attention is AttentionChoice.SDPA:
        raise UsageError(
            "--lancet-attention sdpa is for local layers: Transformer Engine's core attention has fused kernels of its "
            "own. Drop the flag, or pass --transformer-impl local."
        )
    need = needs_own_attention(args)
    if need and config.attention is AttentionChoice.STOCK:
        raise UsageError(
            f"--lancet-attention stock does not work with {need}: Megatron's local core attention takes heads of one "
            "size, sees one rank's tokens only and has no documents. Drop the flag, or pass --lancet-attention sdpa."
        )
    blockers = sdpa_blockers(args)
    if uses_sdpa(args, config) and blockers:
        raise UsageError(
            f"{blockers[0]} does not work with torch's fused attention, which {need or '--lancet-attention sdpa'} "
            "needs. Drop one of the two."
        )
