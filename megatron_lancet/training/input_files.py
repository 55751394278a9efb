"""Checks the files that a run reads, before any process group starts."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import Split
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_lancet.data.hugging_face import HUGGING_FACE_TYPE
from megatron_lancet.data.indexed import check_dataset
from megatron_lancet.errors import UsageError

_SENTENCEPIECE_TOKENIZERS = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_MODEL_START = b"\n"
"""The first byte of a SentencePiece model, a protocol buffer: the tag of its first field, the pieces."""
_SUFFIXES = (".idx", ".bin")
_MEGATRONS_SPLIT = "969, 30, 1"
"""What Megatron's parser takes without ``--split``."""


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
    if args.tokenizer_type == HUGGING_FACE_TYPE and args.tokenizer_model and Path(args.tokenizer_model).is_file():
        # Megatron would look for a model of this name on the hub.
        yield f"--tokenizer-model: {HUGGING_FACE_TYPE} takes a folder, found the file {args.tokenizer_model}"
    for prefix in _data_prefixes(args) if has_lists else ():
        missing = [prefix + suffix for suffix in _SUFFIXES if not Path(prefix + suffix).is_file()]
        if missing and "://" not in prefix:
            yield (
                f"data file not found: {', '.join(missing)}. Give the prefix without .bin/.idx of what "
                "lancet data encode wrote (it ends in _document)."
            )


def check_tokenizer(args: argparse.Namespace) -> None:
    """Checks the file of a SentencePiece tokenizer, if it is on this machine.

    Raises:
        UsageError: the file is something else, for example JSON.
    """
    path = args.tokenizer_model
    if path is None or args.tokenizer_type not in _SENTENCEPIECE_TOKENIZERS or not Path(path).is_file():
        return
    with Path(path).open("rb") as file:
        start = file.read(1)
    if start != _MODEL_START:
        kind = "JSON" if start == b"{" else "another kind of file"
        raise UsageError(
            f"--tokenizer-model {path}: expected a SentencePiece model, as --tokenizer-type {args.tokenizer_type} "
            f"says, found {kind}. Name a .model file, or pass --tokenizer-type HuggingFaceTokenizer for such files."
        )


def check_datasets(args: argparse.Namespace) -> None:
    """Checks the token files of this machine; a file that is missing is no error here.

    Raises:
        UsageError: a file is damaged, so that Megatron would crash, or read beyond its end; or a part of the split
            has no document.
    """
    blend, _ = get_blend_and_blend_per_split(args)
    for prefix in _data_prefixes(args):
        if "://" in prefix or not _is_here(prefix):
            continue
        found = check_dataset(prefix)
        if blend is not None:
            _check_split(args.split, prefix, found.num_sequences)


def _is_here(prefix: str) -> bool:
    return all(Path(prefix + suffix).is_file() for suffix in _SUFFIXES)


def _check_split(split: str | None, prefix: str, num_sequences: int) -> None:
    """Refuses an empty part of a data set: Megatron adds up its tokens until there are enough, which never ends.

    Raises:
        UsageError: a part that has a weight gets no sequence, by Megatron's rounding.
    """
    weights = parse_and_normalize_split(split or _MEGATRONS_SPLIT)
    for part, bounds in zip(Split, convert_split_vector_to_split_matrix(weights), strict=True):
        if bounds is None:
            continue
        first, last = (round(bound * float(num_sequences)) for bound in bounds)
        if first == last:
            raise UsageError(
                f"--split {split or _MEGATRONS_SPLIT} gives the {part.name} part of {prefix} none of its "
                f"{num_sequences} sequences, and Megatron would count its tokens forever. Give each part at least one, "
                "for example --split 90,5,5, or a part the weight 0, for example --split 100,0,0."
            )


def _data_prefixes(args: argparse.Namespace) -> list[str]:
    """Prefixes of the token files, also of those that are listed in other files."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    blends = [blend, *(blend_per_split or ())]
    return [prefix for one in blends if one is not None for prefix in one[0]]
