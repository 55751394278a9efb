"""The tokenizer settings are Megatron's, and unusable tokenizers are refused."""

import ast
import dataclasses
import inspect
import io
from pathlib import Path

import pytest
import sentencepiece
from megatron.core.tokenizers.utils import build_tokenizer as megatron_builder
from megatron.training.config import TokenizerConfig

from megatron_lancet.data.encode import (
    SENTENCEPIECE_TYPES,
    EncodedBatch,
    EncodeJob,
    TokenizerSettings,
    build_tokenizer,
    encode_batch,
)
from megatron_lancet.data.jsonl import LineBatch
from megatron_lancet.errors import UsageError


def test_tokenizer_settings_have_megatrons_names_and_defaults() -> None:
    megatron_defaults = {field.name: field.default for field in dataclasses.fields(TokenizerConfig)}
    for field in dataclasses.fields(TokenizerSettings):
        assert field.name in megatron_defaults
        if field.name not in ("tokenizer_type", "pad_vocab_size"):
            assert field.default == megatron_defaults[field.name], field.name


def test_tokenizer_settings_have_all_that_megatron_reads() -> None:
    """Arguments read in ``build_tokenizer`` outside the branches of tokenizers that we do not build."""
    function = ast.parse(inspect.getsource(megatron_builder.build_tokenizer)).body[0]
    unsupported = ("MEGATRON_TOKENIZERS", "TikTokenizer", "Multimodal", "SFT")
    names = {
        node.attr
        for node in _walk_without_branches(function, unsupported)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args"
    }
    assert {"tokenizer_type", "tokenizer_model", "vocab_size", "metadata_path"} <= names
    assert names <= {field.name for field in dataclasses.fields(TokenizerSettings)}


def _walk_without_branches(node: ast.AST, unsupported: tuple[str, ...]) -> list[ast.AST]:
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If):
        condition = ast.unparse(node.test)
        if "NullTokenizer" not in condition and any(name in condition for name in unsupported):
            children = iter(node.orelse)
    return [node] + [found for child in children for found in _walk_without_branches(child, unsupported)]


@pytest.mark.parametrize("tokenizer_type", SENTENCEPIECE_TYPES)
def test_tokenizer_equals_that_of_a_training_run(model: Path, vocab_size: int, tokenizer_type: str) -> None:
    ours = build_tokenizer(TokenizerSettings(tokenizer_type, str(model)))
    theirs = megatron_builder.build_tokenizer(
        TokenizerConfig(tokenizer_type=tokenizer_type, tokenizer_model=str(model), pad_vocab_size=False)
    )
    assert type(ours) is type(theirs)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod) == (vocab_size, 2)
    assert ours.tokenize("def f():\n    pass\n") == theirs.tokenize("def f():\n    pass\n")
    assert ours.unique_identifiers == theirs.unique_identifiers


def test_null_tokenizer_reads_integers() -> None:
    tokenizer = build_tokenizer(TokenizerSettings("NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert tokenizer.tokenize("5 0 98") == [5, 0, 98]


def test_unusable_tokenizers_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.model"
    broken.write_bytes(b"no model")
    for settings, reason in (
        (TokenizerSettings("TikTokenizer", "gpt2"), "expected --tokenizer-type to be one of Sent.*, HuggingFaceT"),
        (TokenizerSettings("SentencePieceTokenizer"), "needs --tokenizer-model, .*none was given"),
        (TokenizerSettings("SentencePieceTokenizer", str(tmp_path / "none")), "none is no file"),
        (TokenizerSettings("SentencePieceTokenizer", str(tmp_path)), "is no file"),
        (TokenizerSettings("SentencePieceTokenizer", str(broken)), "broken.model is not a readable Sent"),
        (TokenizerSettings("NullTokenizer"), "needs --vocab-size"),
    ):
        with pytest.raises(UsageError, match=reason):
            build_tokenizer(settings)


def encode_with_default_model(tmp_path: Path, lines: tuple[bytes, ...], eos_id: int) -> EncodedBatch:
    """Encode with a model like most published ones: it normalizes text, and drops surplus spaces."""
    model_bytes = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world"] * 9),
        model_writer=model_bytes,
        model_type="bpe",
        vocab_size=16,
        minloglevel=2,
        eos_id=eos_id,
    )
    path = tmp_path / "default.model"
    path.write_bytes(model_bytes.getvalue())
    settings = TokenizerSettings("SentencePieceTokenizer", str(path))
    return encode_batch(EncodeJob(tmp_path / "in", ("text",), settings, append_eod=True), LineBatch(1, lines))


def test_append_eod_needs_an_eod(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="need a tokenizer with an end-of-document id; this one has -1"):
        encode_with_default_model(tmp_path, (b'{"text": "hello"}\n',), eos_id=-1)


def test_text_without_tokens_is_left_out(tmp_path: Path) -> None:
    lines = (b'{"text": "  "}\n', b'{"text": "hello"}\n')
    documents = encode_with_default_model(tmp_path, lines, eos_id=2).documents[0]
    assert documents.num_empty == 1
    assert len(documents.lengths) == 1
    assert documents.tokens[-1] == 2
