"""Which core attention a run needs, and whether it can have it."""

import argparse

from megatron_lancet.config import AttentionChoice, LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.model.attention import sdpa_blockers


def needs_own_attention(args: argparse.Namespace) -> str | None:
    """The flag for which Megatron has no core attention without Transformer Engine, so that ours is used; or None."""
    if args.transformer_impl != "local":
        return None
    if args.context_parallel_size > 1:
        return f"--context-parallel-size {args.context_parallel_size}"
    return "--multi-latent-attention" if args.multi_latent_attention else None


def uses_sdpa(args: argparse.Namespace, config: LancetConfig) -> bool:
    """Whether the user asks for the fused attention kernel, or for what only works with it.

    Sequence chunks bring it by themselves.
    """
    return config.attention is AttentionChoice.SDPA or needs_own_attention(args) is not None


def check_attention(args: argparse.Namespace, config: LancetConfig) -> None:
    """
    Raises:
        UsageError: the core attention that the user asks for can't do what the model needs.
    """
    need = needs_own_attention(args)
    if need and config.attention is AttentionChoice.STOCK:
        raise UsageError(
            f"--lancet-attention stock does not work with {need}: Megatron's local core attention takes heads of one "
            "size and sees one rank's tokens only. Drop the flag, or pass --lancet-attention sdpa."
        )
    blockers = sdpa_blockers(args)
    if uses_sdpa(args, config) and blockers:
        raise UsageError(
            f"{blockers[0]} does not work with torch's fused attention, which {need or '--lancet-attention sdpa'} "
            "brings. Drop one of the two."
        )
