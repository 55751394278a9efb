"""Loss and perplexity of a model on a data set, as Megatron's validation computes them.

The data is one stream of tokens, cut into windows of the model's context. In each window the model predicts the next
token from the earlier ones of the same window, as in training and validation.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.inference.utils import get_attention_mask

from megatron_lancet.data.indexed import check_dataset
from megatron_lancet.data.jsonl import iter_texts, open_input
from megatron_lancet.errors import UsageError
from megatron_lancet.inference.load import LoadedModel

_UNSEEN_LABEL = 0
"""Label beyond the end of the data. Any id will do: its loss is masked out."""


@dataclass(frozen=True)
class TokenStream:
    """The tokens to predict.

    Attributes:
        tokens: [N]; the first one is only context.
        num_text_bytes: size of the text as UTF-8; None if only its tokens are known.
    """

    tokens: np.ndarray
    num_text_bytes: int | None


@dataclass(frozen=True)
class Evaluation:
    """Result for a data set.

    Attributes:
        loss: mean cross entropy in nats per token.
        perplexity: ``exp(loss)``.
        num_tokens: number of predicted tokens.
        bits_per_byte: cross entropy per byte of text; None if the text is not known.
    """

    loss: float
    perplexity: float
    num_tokens: int
    bits_per_byte: float | None


def read_stream(data: str, tokenizer: Any, key: str = "text") -> TokenStream:
    """Read the tokens of a ``.jsonl`` or ``.txt`` file, or of the dataset with the prefix ``data``.

    Texts are joined as by ``lancet data encode --append-eod``, and one end of text precedes the first, so that
    every token of the text is predicted.

    Args:
        key: JSON key of the text in each line of a ``.jsonl`` file.

    Raises:
        UsageError: the data is missing, damaged, or not of this vocabulary.
    """
    if data.endswith((".jsonl", ".txt")):
        stream = _read_text(Path(data), tokenizer, key)
    else:
        stream = TokenStream(check_dataset(data).tokens(), None)
    if len(stream.tokens) < 2:
        raise UsageError(f"{data} has {len(stream.tokens)} tokens; at least 2 are needed to predict one from another.")
    lowest, highest = int(stream.tokens.min()), int(stream.tokens.max())
    if lowest < 0 or highest >= tokenizer.vocab_size:
        raise UsageError(
            f"{data} has ids from {lowest} to {highest}; the checkpoint's tokenizer has 0 to {tokenizer.vocab_size - 1}"
            ". Pass data that was encoded with this tokenizer."
        )
    return stream


def _read_text(path: Path, tokenizer: Any, key: str) -> TokenStream:
    eod = tokenizer.eod
    separator = [eod] if isinstance(eod, int) and 0 <= eod < tokenizer.vocab_size else []
    ids: list[int] = list(separator)
    num_bytes = 0
    for text in filter(None, iter_texts(path, key) if path.suffix == ".jsonl" else [_whole_text(path)]):
        try:
            ids += tokenizer.tokenize(text)
        except ValueError as error:
            raise UsageError(f"{path}: the tokenizer refuses a text: {error}") from error
        ids += separator
        num_bytes += len(text.encode())
    return TokenStream(np.array(ids, dtype=np.int64), num_bytes or None)


def _whole_text(path: Path) -> str:
    with open_input(path) as file:
        data = file.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: expected UTF-8, found something else at byte {error.start}.") from error


def note_on_documents(arguments: argparse.Namespace) -> str | None:
    """What windows do not have that training had, for the user; None if they have all.

    Args:
        arguments: of the training.
    """
    flags = "dataloader_inter_document_masking", "reset_attention_mask"
    given = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(arguments, flag, False)]
    if not given:
        return None
    return (
        f"training had {given[0]}; here tokens also see earlier documents in their window, so the loss is not "
        "comparable to its validation loss"
    )


@dataclass(frozen=True)
class Batch:
    """Windows that a rank computes at once, [windows, tokens of a window] each.

    Attributes:
        inputs: ids.
        labels: the ids that follow.
        weights: 1 where the data has a token to predict, 0 beyond its end.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


def batches(model: LoadedModel, stream: TokenStream, batch_size: int, max_tokens: int | None = None) -> Iterator[Batch]:
    """Yields this rank's batches of a stream, whose windows the ranks take in turn; equally many on every rank.

    Args:
        batch_size: number of windows that a rank computes at once.
        max_tokens: number of tokens to predict, from the first on; None predicts all.
    """
    num_tokens = num_predicted(stream, max_tokens)
    length = min(model.context_length, num_tokens)
    # Every rank runs every step: the ranks of an expert-parallel group exchange rows in each layer.
    for first in range(0, -(-num_tokens // length), batch_size * model.num_ranks):
        start = (first + model.rank * batch_size) * length
        yield Batch(*(part.to(model.device) for part in _batch(stream, start, batch_size, length, num_tokens)))


def num_predicted(stream: TokenStream, max_tokens: int | None) -> int:
    """Number of tokens to predict."""
    return min(len(stream.tokens) - 1, max_tokens or len(stream.tokens))


@torch.inference_mode()
def summed_loss(model: LoadedModel, batch: Batch) -> torch.Tensor:
    """Cross entropy of a batch's tokens, their sum in double precision. Collective: all ranks compute a batch."""
    size, length = batch.inputs.shape
    positions = torch.arange(length, device=model.device).expand(size, -1)
    losses = model.module(batch.inputs, positions, get_attention_mask(length), labels=batch.labels)
    return (losses.double() * batch.weights).sum()


def evaluate(model: LoadedModel, stream: TokenStream, batch_size: int, max_tokens: int | None = None) -> Evaluation:
    """Compute the loss of a model on a stream. Ranks take windows in turn and get the same result.

    Args:
        batch_size: number of windows that a rank computes at once.
        max_tokens: number of tokens to predict, from the first on; None predicts all.
    """
    num_tokens = num_predicted(stream, max_tokens)
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for batch in batches(model, stream, batch_size, max_tokens):
        total += summed_loss(model, batch)
    if model.num_ranks > 1:
        dist.all_reduce(total)
    loss = float(total) / num_tokens
    num_bytes = stream.num_text_bytes if num_tokens == len(stream.tokens) - 1 else None
    bits_per_byte = float(total) / math.log(2) / num_bytes if num_bytes else None
    return Evaluation(loss, math.exp(min(loss, 700.0)), num_tokens, bits_per_byte)


def _batch(
    stream: TokenStream, start: int, batch_size: int, length: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, labels and weights, each [batch_size, length]; beyond the end, weights are 0."""
    end = min(start + batch_size * length, num_tokens)
    inputs, labels, weights = np.full((3, batch_size * length), _UNSEEN_LABEL, dtype=np.int64)
    if end > start:
        inputs[: end - start] = stream.tokens[start:end]
        labels[: end - start] = stream.tokens[start + 1 : end + 1]
        weights[: end - start] = 1
    shape = (batch_size, length)
    return tuple(torch.from_numpy(part.reshape(shape)) for part in (inputs, labels, weights))  # type: ignore[return-value]
