"""Finds the size of the vocabulary, also where the tokenizer is not here."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer, vocab_size_with_padding

from megatron_lancet.errors import UsageError
from megatron_lancet.training.dry_run.cluster import has_package

_PIECES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Entries of tokenizers that have one vocabulary only."""
_TYPICAL_PIECES = 128_000
"""Entries of the tokenizers of today's large models."""
_FROM_ONE_FILE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")


def set_vocabulary_size(args: argparse.Namespace) -> Iterator[str]:
    """Sets ``args.padded_vocab_size``, which Megatron takes from the tokenizer.

    Yields:
        A warning where the size is assumed.

    Raises:
        UsageError: there is no tokenizer, or no size for one.
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
            f"the tokenizer {args.tokenizer_model} is not here: its vocabulary is taken for {pieces} pieces. "
            "--vocab-size N says it"
        )
    args.padded_vocab_size = vocab_size_with_padding(pieces, args, logging_enabled=False)


def _is_here(args: argparse.Namespace) -> bool:
    """Whether Megatron can build the tokenizer from files of this machine; nothing is downloaded."""
    kind = args.tokenizer_type
    if kind == "NullTokenizer":
        return True
    if kind in _FROM_ONE_FILE:
        package = "tiktoken" if kind == "TikTokenizer" else "sentencepiece"
        return bool(args.tokenizer_model) and Path(args.tokenizer_model).is_file() and has_package(package)
    if kind == "HuggingFaceTokenizer":
        return bool(args.tokenizer_model) and Path(args.tokenizer_model).exists() and has_package("transformers")
    return False
