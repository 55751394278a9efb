"""Checks the files that a run reads, before any process group starts."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron.training.utils import get_blend_and_blend_per_split

from megatron_lancet.data.indexed import check_dataset

_SENTENCEPIECE_TOKENIZERS = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


def missing_files(args: argparse.Namespace) -> Iterator[str]:
    """Yields a message for each file that the arguments name and that is not on this machine."""
    has_lists = True
    for path, flag in (
        (args.data_args_path, "--data-args-path"),
        (args.per_split_data_args_path, "--per-split-data-args-path"),
        (args.tokenizer_model, "--tokenizer-model"),
    ):
        local = flag != "--tokenizer-model" or args.tokenizer_type in _SENTENCEPIECE_TOKENIZERS
        if path is not None and local and not Path(path).is_file():
            has_lists = has_lists and flag == "--tokenizer-model"
            yield f"{flag}: no such file: {path}"
    for prefix in _data_prefixes(args) if has_lists else ():
        missing = [prefix + suffix for suffix in (".idx", ".bin") if not Path(prefix + suffix).is_file()]
        if missing and "://" not in prefix:
            yield (
                f"data file not found: {', '.join(missing)}. Give the prefix without .bin/.idx of what "
                "tools/preprocess_data.py wrote (it ends in _document)."
            )


def check_datasets(args: argparse.Namespace) -> None:
    """Checks the token files of this machine.

    Raises:
        UsageError: a file is damaged, so that Megatron would crash, or read beyond its end.
    """
    for prefix in _data_prefixes(args):
        if "://" not in prefix:
            check_dataset(prefix)


def _data_prefixes(args: argparse.Namespace) -> list[str]:
    """Prefixes of the token files, also of those that are listed in other files."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    blends = [blend, *(blend_per_split or ())]
    return [prefix for one in blends if one is not None for prefix in one[0]]
