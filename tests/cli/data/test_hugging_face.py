"""Hugging Face tokenizers: the ids, the end and the vocabulary are Megatron's own; what can't be read is refused."""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.utils import build_tokenizer as megatron_builder
from megatron.training.config import TokenizerConfig

from megatron_lancet.data import hugging_face
from megatron_lancet.data.encode import EncodeJob, TokenizerSettings, build_tokenizer, encode_batch, token_dtype
from megatron_lancet.data.jsonl import LineBatch
from megatron_lancet.errors import UsageError
from tests.cli.data.tiny_bpe import BEGIN, END, VOCAB_SIZE, write_tokenizer
from tests.draws import examples

tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
pytest.importorskip("transformers", reason="needs the package transformers")

GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}
TEXT = "def f(x):\n\treturn 12345 * x  # é 漢字 😀 <|endoftext|> <extra>\n"


@pytest.fixture(scope="module")
def texts(corpus: Path) -> list[str]:
    return [json.loads(line)["text"] for line in corpus.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A tokenizer that ends documents with ``END``."""
    return write_tokenizer(tmp_path_factory.mktemp("hf") / "bpe", texts, **GENERIC, eos_token=END)


def settings(model: Path | str) -> TokenizerSettings:
    return TokenizerSettings("HuggingFaceTokenizer", str(model))


def arguments_for(corpus: Path, prefix: Path, model: Path | str, *more: str) -> list[str]:
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model)]
    return ["--input", str(corpus), "--output-prefix", str(prefix), *tokenizer, *more]


def read_documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return [dataset[index].tolist() for index in range(len(dataset.document_indices) - 1)]


def direct_ids(folder: Path, text: str) -> list[int]:
    """Ids by ``tokenizers`` itself, without Megatron and ``transformers``."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_dataset_equals_direct_encoding_with_any_workers(
    tmp_path: Path,
    corpus: Path,
    texts: list[str],
    folder: Path,
    preprocess_data: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preprocess_data, "BATCH_BYTES", 50_000)
    for workers, model in ((1, folder), (2, folder / "tokenizer.json")):
        flags = ["--append-eod", "--workers", str(workers)]
        preprocess_data.main(arguments_for(corpus, tmp_path / f"data{workers}", model, *flags))
    one, two = (tmp_path / f"data{workers}_text_document" for workers in (1, 2))
    expected = [[*direct_ids(folder, text), 0] for text in texts]
    assert read_documents(one) == expected
    assert sum(map(len, expected)) > 50_000
    assert IndexedDataset(str(one)).index.dtype is np.uint16
    for suffix in (".bin", ".idx"):
        assert Path(f"{one}{suffix}").read_bytes() == Path(f"{two}{suffix}").read_bytes()


def test_pairs_have_masks_as_with_other_tokenizers(tmp_path: Path, folder: Path, preprocess_data: ModuleType) -> None:
    corpus = tmp_path / "pairs.jsonl"
    corpus.write_text('{"q": "def f(x):", "a": "return x"}\n\n{"q": "", "a": "pass"}\n')
    preprocess_data.main(arguments_for(corpus, tmp_path / "data", folder, "--prompt-key", "q", "--answer-key", "a"))
    prompt, answer, short = (direct_ids(folder, text) for text in ("def f(x):", "return x", "pass"))
    assert read_documents(tmp_path / "data_q_a_document") == [[*prompt, *answer, 0], [*short, 0]]
    masks = [[0] * len(prompt) + [1] * (len(answer) + 1), [1] * (len(short) + 1)]
    assert read_documents(tmp_path / "data_q_a_loss_mask") == masks


@pytest.mark.parametrize(
    "config",
    [
        {**GENERIC, "eos_token": END},
        {**GENERIC, "eos_token": "<extra>"},  # not in tokenizer.json: the vocabulary grows
        {**GENERIC, "sep_token": END},  # Megatron takes it as the end
        {**GENERIC, "bos_token": BEGIN},
        {"tokenizer_class": "GPT2Tokenizer"},
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": END},  # other rules for digits than in tokenizer.json
        {"tokenizer_class": "LlamaTokenizerFast", "eos_token": END, "bos_token": BEGIN},
        {},
    ],
)
def test_tokenizer_equals_that_of_a_training_run(tmp_path: Path, texts: list[str], config: dict[str, str]) -> None:
    model = write_tokenizer(tmp_path / "bpe", texts[:3], **config)
    ours = build_tokenizer(settings(model))
    theirs = megatron_builder.build_tokenizer(
        TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(model),
            tokenizer_hf_no_include_special_tokens=True,
            pad_vocab_size=False,
        )
    )
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)
    assert ours.vocab_size == VOCAB_SIZE + (config.get("eos_token") == "<extra>")
    expected = theirs.tokenize(TEXT)
    assert ours.tokenize(TEXT) == hugging_face.batch_ids(ours, [TEXT, "x"])[0] == expected
    assert len(expected) > 8
    assert 1 not in expected, "no token at the beginning"
    assert ours.unique_identifiers["tokenizer_path"] == theirs.unique_identifiers["tokenizer_path"]


def test_training_adds_the_templates_tokens_and_data_do_not(folder: Path) -> None:
    """Megatron's ``tokenize`` adds them by default, but training reads ids, and asks for the end and the size only."""
    theirs = megatron_builder.build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder), pad_vocab_size=False)
    )
    ours = build_tokenizer(settings(folder))
    assert theirs.tokenize("x") == [1, *ours.tokenize("x")]
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod) == (VOCAB_SIZE, 0)


def test_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    from tokenizers.models import WordLevel

    words = {END: 0, **{f"w{index}": index for index in range(1, 70_000)}}
    tokenizer = tokenizers.Tokenizer(WordLevel(words, unk_token=END))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**GENERIC, "eos_token": END}))
    built = build_tokenizer(settings(tmp_path))
    assert (built.vocab_size, token_dtype(built)) == (70_000, np.int32)
    job = EncodeJob(tmp_path / "in", ("text",), settings(tmp_path), append_eod=True)
    documents = encode_batch(job, LineBatch(1, (b'{"text": "w69999 w1"}', b'{"text": ""}'))).documents[0]
    assert documents.tokens.tolist() == [69_999, 1, 0]
    assert (documents.tokens.dtype, documents.num_empty) == (np.int32, 1)


def test_append_eod_needs_an_eos_token(tmp_path: Path, texts: list[str]) -> None:
    model = write_tokenizer(tmp_path / "bpe", texts[:2], **GENERIC, bos_token=BEGIN)
    lines = LineBatch(1, (b'{"text": "x"}',))
    job = EncodeJob(tmp_path / "in", ("text",), settings(model), append_eod=False)
    assert encode_batch(job, lines).documents[0].tokens.tolist() == direct_ids(model, "x")
    with pytest.raises(UsageError, match=r"this one has None in .* of 600 .*name an eos_token in tokenizer_config"):
        encode_batch(EncodeJob(tmp_path / "in", ("text",), settings(model), append_eod=True), lines)


def test_texts_that_a_tokenizer_refuses_are_named(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, "y": 1}, unk_token="none"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    job = EncodeJob(tmp_path / "in", ("text",), settings(tmp_path), append_eod=False)
    with pytest.raises(UsageError, match=r"in, line 2: the tokenizer refused the text \(.*"):
        encode_batch(job, LineBatch(1, (b'{"text": "x"}', b'{"text": "y z"}', b'{"text": "z"}')))


def test_unusable_tokenizers_are_refused_in_one_line(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "config_only").mkdir()
    (tmp_path / "config_only" / "tokenizer_config.json").write_text(json.dumps(GENERIC))
    (tmp_path / "my.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes()[:3000])
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "####"
    (tmp_path / "panic").mkdir()
    (tmp_path / "panic" / "tokenizer.json").write_text(json.dumps(content))
    for model, reason in (
        ("", "on the hub; none was given"),
        (tmp_path / "empty", "empty has none of tokenizer.json, "),
        (tmp_path / "config_only", "config_only has none of tokenizer.json, "),
        (tmp_path / "my.json", "my.json is another file. Save it as tokenizer.json in a folder of its own"),
        (tmp_path / "none", "none does not exist"),
        ("none.json", "none.json does not exist"),
        (tmp_path / "cut", r"the tokenizer in .*cut can't be read \(.*\); copy its files again"),
        (tmp_path / "panic", r"the tokenizer in .*panic can't be read \(.*\); copy its files again"),
    ):
        with pytest.raises(UsageError, match=reason) as refused:
            build_tokenizer(settings(model))
        assert "\n" not in str(refused.value)
    monkeypatch.setattr(hugging_face, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs tokenizers and transformers: pip install tokenizers transformers$"):
        build_tokenizer(settings(folder))


def test_tool_refuses_before_megatron_is_imported(tmp_path: Path, run_tool) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "x"}\n')
    result = run_tool("data/preprocess_data", *arguments_for(corpus, tmp_path / "data", tmp_path))
    assert result.returncode == 2
    assert result.stderr.startswith("error: --tokenizer-type HuggingFaceTokenizer needs --tokenizer-model, a folder")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [corpus]


def test_names_on_the_hub_go_to_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hugging_face.tokenizer_source("Qwen/Qwen3-30B-A3B") == "Qwen/Qwen3-30B-A3B"
    monkeypatch.setattr(sys.modules["huggingface_hub.constants"], "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"no folder none/of-this-name, and no such tokenizer .*; pass a folder"):
        build_tokenizer(settings("none/of-this-name"))


def test_own_code_of_a_tokenizer_does_not_run(tmp_path: Path, texts: list[str]) -> None:
    model = write_tokenizer(tmp_path / "bpe", texts[:1])
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(UsageError, match=r"bpe can't be read \("):
        build_tokenizer(TokenizerSettings("HuggingFaceTokenizer", str(model), trust_remote_code=True))
    assert not (tmp_path / "ran").exists()


def test_damaged_files_are_refused_or_read(tmp_path: Path, folder: Path) -> None:
    good = (folder / "tokenizer.json").read_bytes()
    path = tmp_path / "tokenizer.json"

    @examples(25)
    @given(st.integers(0, len(good) - 1), st.binary(max_size=3), st.booleans())
    def check(start: int, new: bytes, cuts: bool) -> None:
        path.write_bytes(good[:start] + new + (b"" if cuts else good[start + len(new) :]))
        build_tokenizer.cache_clear()
        message, tokens = encoded_or_refused(tmp_path)
        assert (tmp_path.name in message and "\n" not in message) if message else tokens
        assert all(0 <= token < build_tokenizer(settings(tmp_path)).vocab_size for token in tokens)
        refused.append(bool(message))

    refused: list[bool] = []
    check()
    assert any(refused)
    build_tokenizer.cache_clear()


def encoded_or_refused(folder: Path) -> tuple[str, list[int]]:
    """The message for a user, or the ids of ``TEXT``."""
    job = EncodeJob(folder / "in", ("text",), settings(folder), append_eod=False)
    try:
        batch = encode_batch(job, LineBatch(1, (json.dumps({"text": TEXT}).encode(),)))
    except UsageError as error:
        return str(error), []
    return "", batch.documents[0].tokens.tolist()
