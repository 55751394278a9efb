"""Batches of JSONL lines to token ids, with the tokenizer that Megatron itself would build.

Importing this module imports Megatron (seconds), so the tools do it after their cheap checks.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lancet.data.hugging_face import HUGGING_FACE_TYPE, batch_ids, refusal, tokenizer_source, use_one_core
from megatron_lancet.data.jsonl import LineBatch, parse_line
from megatron_lancet.errors import UsageError, reason_of

with warnings.catch_warnings():
    # Megatron warns that Transformer Engine and Apex are missing; no tokenizer needs them.
    warnings.simplefilter("ignore", UserWarning)
    from megatron.core.datasets.indexed_dataset import DType
    from megatron.core.tokenizers.utils import build_tokenizer as megatron_builder

SENTENCEPIECE_TYPES: tuple[str, ...] = tuple(megatron_builder.SP_TOKENIZERS)


@dataclass(frozen=True)
class TokenizerSettings:
    """The arguments that Megatron 0.19's ``build_tokenizer`` reads, under its names and with its defaults.

    ``tests/cli/data/test_encode.py`` compares names and defaults with the installed Megatron.

    Attributes:
        tokenizer_type: one of :data:`SENTENCEPIECE_TYPES`, ``HuggingFaceTokenizer`` or ``NullTokenizer``.
        tokenizer_model: path of the SentencePiece ``.model`` file; folder or hub name of a Hugging Face tokenizer.
        vocab_size: number of ids of ``NullTokenizer``, whose end-of-document id is the last of them.
        pad_vocab_size: off, because padding concerns the model's embedding, not the data.
    """

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    metadata_path: str | None = None
    chat_template: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    special_tokens: tuple[str, ...] | None = None
    tokenizer_sentencepiece_legacy: bool = False
    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = True
    tokenizer_hf_no_use_fast: bool = False
    tokenizer_hf_no_include_special_tokens: bool = False
    trust_remote_code: bool = False
    null_tokenizer_eod_id: int | None = None
    null_tokenizer_pad_id: int = -1
    pad_vocab_size: bool = False


@dataclass(frozen=True)
class EncodeJob:
    """Settings that all batches of one run share.

    Attributes:
        input_path: file of the lines, for error messages.
        keys: JSON keys; one dataset is written for each.
        append_eod: end every document with the tokenizer's end-of-document id.
        joins_pair: the keys name a prompt and its answer, which make one document of one dataset.
    """

    input_path: Path
    keys: tuple[str, ...]
    settings: TokenizerSettings
    append_eod: bool
    joins_pair: bool = False


@dataclass(frozen=True)
class EncodedDocuments:
    """Documents of one key, or of one pair of keys, in one batch; texts without a token are left out.

    Attributes:
        tokens: [num_tokens], all documents one after the other, in the dataset's dtype.
        lengths: number of tokens of each document, end-of-document included; they sum to num_tokens.
        num_empty: number of texts that were left out.
        loss_mask: [num_tokens] uint8, 1 where the token counts as a label; None if all of them do.
    """

    tokens: np.ndarray
    lengths: tuple[int, ...]
    num_empty: int
    loss_mask: np.ndarray | None = None

    def split(self) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Of each document the tokens [length], and its part of the loss mask."""
        end = 0
        for length in self.lengths:
            begin, end = end, end + length
            yield self.tokens[begin:end], None if self.loss_mask is None else self.loss_mask[begin:end]


@dataclass(frozen=True)
class EncodedBatch:
    """Result of one :class:`LineBatch` of ``num_input_bytes``, with one entry of documents per key of the job."""

    num_input_bytes: int
    documents: tuple[EncodedDocuments, ...]


# Cached per process: a worker receives the settings with every batch, but must load the model only once.
@lru_cache(maxsize=1)
def build_tokenizer(settings: TokenizerSettings) -> Any:
    """Megatron's tokenizer for ``settings`` (``.tokenize``, ``.eod``, ``.vocab_size``).

    Raises:
        UsageError: the model is missing or damaged; a package or ``vocab_size`` is missing.
    """
    if settings.tokenizer_type == HUGGING_FACE_TYPE:
        return _hugging_face_tokenizer(settings)
    if settings.tokenizer_type == "NullTokenizer":
        if settings.vocab_size is None:
            raise UsageError("--tokenizer-type NullTokenizer needs --vocab-size")
        return megatron_builder.build_tokenizer(settings)
    if settings.tokenizer_type not in SENTENCEPIECE_TYPES:
        supported = ", ".join((*SENTENCEPIECE_TYPES, HUGGING_FACE_TYPE, "NullTokenizer"))
        raise UsageError(f"expected --tokenizer-type to be one of {supported}; got {settings.tokenizer_type}")
    model = settings.tokenizer_model
    if model is None or not Path(model).is_file():
        found = "none was given" if model is None else f"{model} is no file"
        raise UsageError(
            f"--tokenizer-type {settings.tokenizer_type} needs --tokenizer-model, a SentencePiece .model file; {found}"
        )
    try:
        return megatron_builder.build_tokenizer(settings)
    except (RuntimeError, ValueError) as error:  # ValueError: a message of SentencePiece that is no UTF-8
        raise UsageError(f"{model} is not a readable SentencePiece model ({error})") from error


def _hugging_face_tokenizer(settings: TokenizerSettings) -> Any:
    """Megatron's tokenizer, which adds no special tokens to a text; a tokenizer's own Python code never runs."""
    source = tokenizer_source(settings.tokenizer_model)
    use_one_core()
    safe = replace(
        settings, tokenizer_model=source, tokenizer_hf_no_include_special_tokens=True, trust_remote_code=False
    )
    try:
        return megatron_builder.build_tokenizer(safe)
    except BaseException as error:  # the packages document none, and a panic of their Rust code is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise refusal(source, error) from error


def token_dtype(tokenizer: Any) -> type[np.number]:
    """Smallest type that Megatron's datasets offer for the ids of ``tokenizer``."""
    return DType.optimal_dtype(tokenizer.vocab_size)


def encode_batch(job: EncodeJob, batch: LineBatch) -> EncodedBatch:
    """Parse and tokenize the lines of ``batch``.

    Raises:
        UsageError: the first line that cannot be used, with file and line number.
    """
    tokenizer = build_tokenizer(job.settings)
    if job.append_eod and (tokenizer.eod is None or not 0 <= tokenizer.eod < tokenizer.vocab_size):
        raise UsageError(
            f"--append-eod and --answer-key need a tokenizer with an end-of-document id; this one has {tokenizer.eod}"
            f" in a vocabulary of {tokenizer.vocab_size} (SentencePiece: train it with an eos_id; Hugging Face: name an"
            " eos_token in tokenizer_config.json)"
        )
    if job.joins_pair:
        return EncodedBatch(batch.num_bytes, (_encode_pairs(job, batch, tokenizer),))
    eod_ids = [tokenizer.eod] if job.append_eod else []
    ids_of_key: list[list[list[int]]] = [[] for _ in job.keys]
    num_empty = [0] * len(job.keys)
    for position, (_, ids) in enumerate(_encode_lines(job, batch, tokenizer)):
        column = position % len(job.keys)
        if ids:
            ids_of_key[column].append(ids + eod_ids)
        else:
            num_empty[column] += 1
    dtype = token_dtype(tokenizer)
    documents = tuple(
        EncodedDocuments(
            tokens=np.fromiter(chain.from_iterable(ids_of_document), dtype),
            lengths=tuple(map(len, ids_of_document)),
            num_empty=empty,
        )
        for ids_of_document, empty in zip(ids_of_key, num_empty, strict=True)
    )
    return EncodedBatch(batch.num_bytes, documents)


def _encode_pairs(job: EncodeJob, batch: LineBatch, tokenizer: Any) -> EncodedDocuments:
    """One document a line: the prompt's tokens, which are no labels, then the answer's, which are, as is the end.

    Both are tokenized for themselves, as they are when a model is asked and answers.
    """
    eod_ids = [tokenizer.eod] if job.append_eod else []
    ids: list[list[int]] = []
    masks: list[list[int]] = []
    encoded = _encode_lines(job, batch, tokenizer)
    for (location, prompt), (_, answer) in zip(encoded, encoded, strict=True):
        if not answer:
            raise UsageError(
                f"{location}: expected an answer under {job.keys[1]!r}, found none that gives a token; a prompt alone "
                "has no token to train on, so remove the line"
            )
        ids.append(prompt + answer + eod_ids)
        masks.append([0] * len(prompt) + [1] * (len(answer) + len(eod_ids)))
    return EncodedDocuments(
        tokens=np.fromiter(chain.from_iterable(ids), token_dtype(tokenizer)),
        lengths=tuple(map(len, ids)),
        num_empty=0,
        loss_mask=np.fromiter(chain.from_iterable(masks), np.uint8),
    )


def _encode_lines(job: EncodeJob, batch: LineBatch, tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    """Of each text, line by line in the order of the keys: file and line number, and its ids."""
    texts = (
        (location, text)
        for line_number, line in enumerate(batch.lines, start=batch.first_line_number)
        for location in (f"{job.input_path}, line {line_number}",)
        for text in parse_line(line, job.keys, location) or ()
    )
    if job.settings.tokenizer_type != HUGGING_FACE_TYPE:
        for location, text in texts:
            yield location, _encode_text(tokenizer, text, location)
        return
    known = list(texts)
    ids_of_texts = iter(_encode_together(tokenizer, [(location, text) for location, text in known if text]))
    for location, text in known:
        yield location, _checked(next(ids_of_texts) if text else [], tokenizer, location)


def _encode_together(tokenizer: Any, texts: list[tuple[str, str]]) -> list[list[int]]:
    """Ids of each (location, text), encoded in one call by a Hugging Face tokenizer."""
    try:
        return batch_ids(tokenizer, [text for _, text in texts])
    except Exception as error:  # the packages document none
        if len(texts) == 1:
            raise UsageError(f"{texts[0][0]}: the tokenizer refused the text ({reason_of(error)})") from error
    return [ids for one in texts for ids in _encode_together(tokenizer, [one])]


def _encode_text(tokenizer: Any, text: str, location: str) -> list[int]:
    """Ids of one text, all within the vocabulary; none for an empty text."""
    if not text:
        return []  # NullTokenizer would fail on it.
    try:
        ids = tokenizer.tokenize(text)
    except ValueError as error:  # NullTokenizer on a text that is not integers
        raise UsageError(f"{location}: the tokenizer refused the text ({error})") from error
    return _checked(ids, tokenizer, location)


def _checked(ids: list[int], tokenizer: Any, location: str) -> list[int]:
    """Refuses ids outside the vocabulary, for which the model has no embedding."""
    if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
        raise UsageError(
            f"{location}: expected token ids from 0 to {tokenizer.vocab_size - 1}, found"
            f" {min(ids)} to {max(ids)}; does the tokenizer, or --vocab-size, fit the data?"
        )
    return ids
