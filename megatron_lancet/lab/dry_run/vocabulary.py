"""Finds the size of the vocabulary, or assumes one where the tokenizer is not on this machine."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer, vocab_size_with_padding

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.dry_run.cluster import has_package
from megatron_lancet.lab.dry_run.missing import TOKENIZER_PACKAGES

_PIECES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Vocabulary sizes of tokenizers that have only one."""
_TYPICAL_PIECES = 128_000
"""Vocabulary size of the tokenizers of today's large models."""


def set_vocabulary_size(args: argparse.Namespace) -> Iterator[str]:
    """Sets ``args.padded_vocab_size``, which Megatron takes from the tokenizer.

    Yields:
        A warning where the size is assumed.

    Raises:
        UsageError: no tokenizer is named, or its size is missing.
    """
    if args.tokenizer_type is None:
        raise UsageError("--tokenizer-type is missing: Megatron builds no model without a tokenizer.")
    if args.tokenizer_type == "NullTokenizer" and not args.vocab_size:
        raise UsageError("--tokenizer-type NullTokenizer needs --vocab-size.")
    if _is_here(args):
        build_tokenizer(args)
    if args.padded_vocab_size is not None:
        return
    pieces = args.vocab_size or _PIECES.get(args.tokenizer_type)
    if pieces is None:
        pieces = _TYPICAL_PIECES
        yield (
            f"the tokenizer {args.tokenizer_model} is not here: {pieces} pieces are assumed. Pass "
            "--vocab-size N for another number"
        )
    args.padded_vocab_size = vocab_size_with_padding(pieces, args, logging_enabled=False)


def _is_here(args: argparse.Namespace) -> bool:
    """Whether Megatron can build the tokenizer from files of this machine; nothing is downloaded."""
    kind, model = args.tokenizer_type, args.tokenizer_model
    if kind == "NullTokenizer":
        return True
    if not model or kind == "GPT2BPETokenizer" or kind not in TOKENIZER_PACKAGES:
        return False
    exists = Path(model).exists() if kind == "HuggingFaceTokenizer" else Path(model).is_file()
    return exists and has_package(TOKENIZER_PACKAGES[kind])
