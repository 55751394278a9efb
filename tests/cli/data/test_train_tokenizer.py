"""The tokenizer is exact, reproducible, and one that Megatron accepts."""

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.data.encode import TokenizerSettings, build_tokenizer
from megatron_lancet.errors import UsageError
from tests.draws import examples

SPACE_SYMBOL = "\u2581"

AWKWARD_TEXTS = [
    "def f(x):\n    if x:\n\t\treturn  1234\n\n\n",
    " leading and trailing ",
    "\t\ttabs\tinside\t",
    "carriage\r\nreturns\r",
    "é e\u0301 日本語 ελλην 👩‍👩‍👧 \U0010ffff",
    "zero\0width\u200b\ufeff\u3000\xa0\u2028\x0b\x0c\x1f",
    "<s></s><unk><pad><0x0A>",
    "\ufffd \u2047 ",
    " ",
    "\n",
]


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    """What Megatron builds for the trained model."""
    return build_tokenizer(TokenizerSettings("SentencePieceTokenizer", str(model)))


def write_corpus(path: Path, texts: Iterable[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def arguments_for(corpus: Path, prefix: Path, vocab_size: int, *more: str) -> list[str]:
    return ["--input", str(corpus), "--output-prefix", str(prefix), "--vocab-size", str(vocab_size), *more]


def test_tokenizer_has_the_ids_that_megatron_needs(tokenizer: Any, vocab_size: int) -> None:
    assert tokenizer.vocab_size == vocab_size
    assert (tokenizer.unk, tokenizer.bos, tokenizer.eos, tokenizer.pad) == (0, 1, 2, 3)
    assert tokenizer.eod == tokenizer.eos
    assert tokenizer.tokenize("") == []


@pytest.mark.parametrize("text", AWKWARD_TEXTS)
def test_tokenizer_round_trip_of_awkward_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert not {0, 1, 2, 3} & set(ids), "text must not turn into special ids"


text_without_space_symbol = st.text(st.characters(codec="utf-8", exclude_characters=SPACE_SYMBOL)) | st.text(
    st.sampled_from(" \n\tae0_(é日<>")
)


@examples(300)
@given(text=text_without_space_symbol)
def test_tokenizer_round_trip_of_any_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_tokenizer_replaces_the_space_symbol_of_sentencepiece(tokenizer: Any) -> None:
    assert tokenizer.detokenize(tokenizer.tokenize(f"a{SPACE_SYMBOL}b")) == "a b"


def test_tokenizer_round_trip_of_the_corpus_needs_few_tokens(tokenizer: Any, corpus: Path) -> None:
    texts = [json.loads(line)["text"] for line in corpus.read_text("utf-8").split("\n") if line]
    num_tokens = 0
    for text in texts:
        ids = tokenizer.tokenize(text)
        assert tokenizer.detokenize(ids) == text
        num_tokens += len(ids)
    assert 2 * num_tokens < sum(len(text.encode()) for text in texts)


def test_tokenizer_has_pieces_of_newline_tab_and_indentation(model: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    pieces = processor.encode("\n    x\t", out_type=str)
    assert pieces == ["\n", 4 * SPACE_SYMBOL, "x", "\t"] or pieces == [
        "\n",
        3 * SPACE_SYMBOL,
        f"{SPACE_SYMBOL}x",
        "\t",
    ]


def test_tokenizer_splits_numbers_into_digits(train_tokenizer: ModuleType) -> None:
    model_bytes = train_tokenizer.train_model(["year 2026 and 2026"] * 50, 365)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    assert processor.encode("2026", out_type=str) == list("2026")


@pytest.mark.parametrize(
    "texts",
    [["abab", "ab\nba", "aba"], ["a b a b"], ["    "] * 9, ["日本語の文章です日本語"], ["~" * 5000]],
    ids=["no_space", "few_characters", "only_spaces", "no_ascii", "one_character"],
)
def test_tokenizer_always_has_pieces_of_space_and_ascii(train_tokenizer: ModuleType, texts: list[str]) -> None:
    sentences = list(train_tokenizer.iter_sentences(texts))
    with pytest.raises(UsageError, match="largest possible is ") as error:
        train_tokenizer.train_model(sentences, 4000)
    largest = int(str(error.value).partition("possible is ")[2].split(";")[0])
    model_bytes = train_tokenizer.train_model(sentences, largest)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    pieces = {processor.id_to_piece(number) for number in range(largest)}
    assert pieces >= {SPACE_SYMBOL, *map(chr, range(0x21, 0x7F))}
    assert processor.decode(processor.encode("a  b zß\n")) == "a  b zß\n"


def test_tokenizer_training_is_deterministic_across_processes(
    tmp_path: Path,
    corpus: Path,
    model: Path,
    vocab_size: int,
    run_tool: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    completed = run_tool("data/train_tokenizer", *arguments_for(corpus, tmp_path / "other", vocab_size))
    assert completed.returncode == 0, completed.stderr
    output = tmp_path / "other.model"
    assert completed.stdout.startswith(f"{output}: {vocab_size} pieces learned from ")
    assert digest(output) == digest(model)
    assert list(tmp_path.iterdir()) == [output]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_impossible_vocabulary_size_names_the_possible_ones(tmp_path: Path, train_tokenizer: ModuleType) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["hello world hello"] * 3)
    output = tmp_path / "tok.model"
    output.write_text("older")
    for requested, reason in ((4000, "largest possible is "), (300, "alone need ")):
        with pytest.raises(UsageError, match=f"--vocab-size {requested} is too") as error:
            train_tokenizer.main(arguments_for(corpus, tmp_path / "tok", requested))
        assert output.read_text() == "older"
        possible = int(str(error.value).partition(reason)[2].split(";")[0])
        model_bytes = train_tokenizer.train_model(["hello world hello"] * 3, possible)
        assert sentencepiece.SentencePieceProcessor(model_proto=model_bytes).vocab_size() == possible
    assert sorted(tmp_path.iterdir()) == [corpus, output]


def test_other_errors_of_tokenizer_training_keep_their_text(train_tokenizer: ModuleType) -> None:
    with pytest.raises(UsageError, match=r"could not train a model with --vocab-size 400: .*sentences_"):
        train_tokenizer.train_model([], 400)


def test_tokenizer_sample_is_every_kth_line(tmp_path: Path, train_tokenizer: ModuleType) -> None:
    texts = [f"line {number}\n\nmore {number}" for number in range(100)]
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    num_bytes = corpus.stat().st_size
    everything = train_tokenizer.sample_sentences(corpus, "text", num_bytes)
    assert everything[:4] == ["line 0", "more 0", "line 1", "more 1"]
    assert len(everything) == 200
    assert train_tokenizer.sample_sentences(corpus, "text", num_bytes / 2.5) == everything[::3]


def test_tokenizer_sample_cuts_long_lines(train_tokenizer: ModuleType) -> None:
    limit = train_tokenizer.MAX_SENTENCE_CHARACTERS
    text = "日" * (2 * limit + 5)
    sentences = list(train_tokenizer.iter_sentences([text]))
    assert [len(sentence) for sentence in sentences] == [limit, limit, 5]
    model_bytes = train_tokenizer.train_model(sentences[:1], 362)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    assert processor.piece_to_id("日日") != processor.unk_id(), "the long line was not learned from"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"text": "a"}\n{"text": 1}\n', r"corpus\.jsonl, line 2: expected a string"),
        (b'{"text": "a"}\n\n{"text": "\xff"}\n', r"corpus\.jsonl, line 3: expected UTF-8"),
        (b"", "has no text to learn from"),
        (b'{"text": "\\n\\n"}\n', "has no text to learn from"),
    ],
)
def test_tokenizer_training_refuses_an_unusable_corpus(
    tmp_path: Path,
    train_tokenizer: ModuleType,
    content: bytes,
    reason: str,
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(content)
    with pytest.raises(UsageError, match=reason):
        train_tokenizer.main(arguments_for(corpus, tmp_path / "tok", 400))
    assert list(tmp_path.iterdir()) == [corpus]


def test_tokenizer_training_refuses_unusable_paths(tmp_path: Path, corpus: Path, train_tokenizer: ModuleType) -> None:
    with pytest.raises(UsageError, match=r"cannot read input file .*none: No such file"):
        train_tokenizer.main(arguments_for(tmp_path / "none", tmp_path / "tok", 400))
    with pytest.raises(UsageError, match=r"output folder .*none does not exist"):
        train_tokenizer.main(arguments_for(corpus, tmp_path / "none" / "tok", 400))


def test_train_tokenizer_exit_status_and_message(
    tmp_path: Path, run_tool: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["hello world"])
    failed = run_tool("data/train_tokenizer", *arguments_for(corpus, tmp_path / "tok", 4000))
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: --vocab-size 4000 is too large for this corpus: the largest ")
    assert failed.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [corpus]
