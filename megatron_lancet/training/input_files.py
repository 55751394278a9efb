"""Files that a run reads: looked for before any process group starts."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron.training.utils import get_blend_and_blend_per_split

from megatron_lancet.data.indexed import check_dataset

_SENTENCEPIECE_TOKENIZERS = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


def missing_files(args: argparse.Namespace) -> Iterator[str]:
    """Files that the arguments name and that are not on this machine, a message for each.

    Files first: a run should not wait for its process groups to learn that its data is not there.
    """
    lists_are_here = True
    for path, flag in (
        (args.data_args_path, "--data-args-path"),
        (args.per_split_data_args_path, "--per-split-data-args-path"),
        (args.tokenizer_model, "--tokenizer-model"),
    ):
        local = flag != "--tokenizer-model" or args.tokenizer_type in _SENTENCEPIECE_TOKENIZERS
        if path is not None and local and not Path(path).is_file():
            lists_are_here = lists_are_here and flag == "--tokenizer-model"
            yield f"{flag}: no such file: {path}"
    for prefix in _data_prefixes(args) if lists_are_here else ():
        missing = [prefix + suffix for suffix in (".idx", ".bin") if not Path(prefix + suffix).is_file()]
        if missing and "://" not in prefix:
            yield (
                f"data file not found: {', '.join(missing)}. Give the prefix without .bin/.idx of what "
                "tools/preprocess_data.py wrote (it ends in _document)."
            )


def check_datasets(args: argparse.Namespace) -> None:
    """
    Raises:
        UsageError: a token file is damaged: Megatron would crash on it, or read what is not there.
    """
    for prefix in _data_prefixes(args):
        if "://" not in prefix:
            check_dataset(prefix)


def _data_prefixes(args: argparse.Namespace) -> list[str]:
    """Of token files; lists of them, which may stand in files of their own, are read."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    blends = [blend, *(blend_per_split or ())]
    return [prefix for one in blends if one is not None for prefix in one[0]]
