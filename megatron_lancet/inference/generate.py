"""Text from a prompt, token by token, with Megatron's forward pass, KV cache and sampler.

docs/evaluate_generate.md lists which parts of ``megatron.core.inference`` are used, and why not all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling.torch_sampling import TorchSampling
from megatron.core.inference.utils import InferenceMode, get_attention_mask

from megatron_lancet.errors import UsageError
from megatron_lancet.inference.load import LoadedModel
from megatron_lancet.inference.sampling import Sampling

_UNFINISHED = "\ufffd"
"""The character to which a tokenizer decodes the first bytes of an incomplete character."""

NextLogits = Callable[[Sequence[int]], torch.Tensor]
"""Maps all tokens so far to the logits [vocabulary] of the next one."""


class Ending(StrEnum):
    """Why a text ended."""

    END_OF_TEXT = "end of text"
    MAX_TOKENS = "maximum of tokens"
    CONTEXT_FULL = "context full"


@dataclass(frozen=True)
class Generation:
    """A finished text. ``text`` excludes the prompt, and ``tokens``, its ids, the one that ends a text."""

    prompt: str
    text: str
    tokens: list[int]
    ended: Ending


def prompt_ids(tokenizer: Any, prompt: str, context_length: int) -> list[int]:
    """Tokens of a prompt.

    Raises:
        UsageError: the prompt has no token, or leaves no room for another one in the model's context.
    """
    if not prompt:
        raise UsageError("the prompt is empty: pass at least one character.")
    try:
        ids: list[int] = list(tokenizer.tokenize(prompt))
    except ValueError as error:  # NullTokenizer on a text that is not integers; a lone surrogate
        raise UsageError(f"the tokenizer refuses the prompt: {error}") from error
    if not ids:
        raise UsageError(f"the prompt {prompt[:40]!r} is no token to the tokenizer: pass other text.")
    if not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
        raise UsageError(
            f"the prompt has ids from {min(ids)} to {max(ids)}; the vocabulary has 0 to {tokenizer.vocab_size - 1}."
        )
    if len(ids) >= context_length:
        raise UsageError(
            f"the prompt has {len(ids)} tokens; the model's context of {context_length} has room for at most "
            f"{context_length - 1} and a new one. Pass a shorter prompt."
        )
    return ids


def full_forward(model: LoadedModel) -> NextLogits:
    """Logits from a forward pass over all tokens, without a cache."""

    @torch.inference_mode()
    def logits(tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(tokens)], device=model.device)
        positions = torch.arange(len(tokens), device=model.device)[None]
        result: torch.Tensor = model.module(ids, positions, get_attention_mask(len(tokens)))
        return result[0, -1]

    return logits


def cached_forward(model: LoadedModel, max_tokens: int) -> NextLogits:
    """Logits from Megatron's inference wrapper, which keeps the keys and values of up to ``max_tokens`` tokens."""
    context = StaticInferenceContext(max_batch_size=1, max_sequence_length=max_tokens)
    wrapper = GPTInferenceWrapper(model.module, context)
    wrapper.prep_model_for_inference()
    inputs = wrapper.prep_inference_input(torch.zeros((1, max_tokens), dtype=torch.long, device=model.device))
    num_done = 0

    @torch.inference_mode()
    def logits(tokens: Sequence[int]) -> torch.Tensor:
        nonlocal num_done
        inputs["tokens"][0, num_done : len(tokens)] = torch.tensor(list(tokens[num_done:]), device=model.device)
        with InferenceMode.active():
            result = wrapper.run_one_forward_step(wrapper.get_batch_for_context_window(inputs, num_done, len(tokens)))
        num_done = len(tokens)
        context.enable_decode_mode()
        last: torch.Tensor = result[0, -1]
        return last

    return logits


def next_tokens(model: LoadedModel, prompt: Sequence[int], vocab_size: int, sampling: Sampling) -> Iterator[int]:
    """Tokens that follow a prompt, until the context is full. All ranks get the same.

    Args:
        vocab_size: number of the tokenizer's ids; ids that only pad the model's vocabulary are never drawn.
    """
    forward = cached_forward(model, model.context_length) if model.can_cache else full_forward(model)
    generator = torch.Generator(device=model.device)
    generator.manual_seed(sampling.seed)
    # For Megatron's sampler 0 means all; it refuses a ``top_k`` of the size of the vocabulary.
    top_k = sampling.top_k if sampling.top_k is not None and sampling.top_k < vocab_size else 0
    top_p = sampling.top_p or 0.0
    tokens = list(prompt)
    while len(tokens) < model.context_length:
        logits = forward(tokens)[None, :vocab_size].float()
        if sampling.greedy:
            chosen = logits.argmax(dim=-1)
        else:
            chosen = TorchSampling.sample_from_logits(
                logits, sampling.temperature, top_k, top_p, generator=generator, vocab_size=vocab_size
            )
        if model.num_ranks > 1:
            dist.broadcast(chosen, src=0)  # ranks' sums may differ in the last bit, texts must not
        tokens.append(int(chosen))
        yield tokens[-1]


def stream_text(tokenizer: Any, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """The text of ``tokens`` in pieces, each as soon as it consists of complete characters."""
    known = list(prompt)
    shown = tokenizer.detokenize(known)
    text = shown
    for token in tokens:
        known.append(token)
        text = tokenizer.detokenize(known)
        if text.startswith(shown) and len(text) > len(shown) and not text.endswith(_UNFINISHED):
            yield text[len(shown) :]
            shown = text
    if len(text) > len(shown):
        yield text[len(shown) :]


def generate(
    model: LoadedModel,
    tokenizer: Any,
    prompt: str,
    sampling: Sampling,
    max_tokens: int,
    show: Callable[[str], None] = lambda piece: None,
    stop_at_end: bool = True,
) -> Generation:
    """Continue a prompt.

    Args:
        max_tokens: maximum number of new tokens.
        show: called with each piece of the text as soon as it is known.
        stop_at_end: end where the model ends a text.

    Raises:
        UsageError: see :func:`prompt_ids`.
    """
    ids = prompt_ids(tokenizer, prompt, model.context_length)
    tokens: list[int] = []
    ended = Ending.CONTEXT_FULL

    def until_end() -> Iterator[int]:
        nonlocal ended
        for token in next_tokens(model, ids, tokenizer.vocab_size, sampling):
            if stop_at_end and token == tokenizer.eod:
                ended = Ending.END_OF_TEXT
                return
            tokens.append(token)
            yield token
            if len(tokens) == max_tokens:
                ended = Ending.MAX_TOKENS
                return

    pieces = []
    for piece in stream_text(tokenizer, ids, until_end()):
        show(piece)
        pieces.append(piece)
    return Generation(prompt, "".join(pieces), tokens, ended)
