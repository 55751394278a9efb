"""The tokenizer of a checkpoint, whose arguments somebody else may have written."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_lancet.data import hugging_face
from megatron_lancet.data.encode import build_tokenizer
from megatron_lancet.errors import UsageError
from megatron_lancet.inference import load
from megatron_lancet.inference.checkpoint_reader import StoredRun
from megatron_lancet.inference.evaluate import read_stream
from megatron_lancet.inference.generate import prompt_ids
from tests.cli.data.tiny_bpe import END, write_tokenizer


def stored_run(tokenizer_model, padded_vocab_size, **more):
    arguments = argparse.Namespace(
        **{"tokenizer_type": "HuggingFaceTokenizer", **more},
        tokenizer_model=str(tokenizer_model),
        padded_vocab_size=padded_vocab_size,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=1,
    )
    return StoredRun(Path("checkpoint"), 1, arguments, None)


@pytest.mark.parametrize("model_file", [None, Path("elsewhere")])
@pytest.mark.parametrize("tokenizer_type", ["HuggingFaceTokenizer", "MultimodalTokenizer"])
def test_trust_remote_code_is_not_passed_to_the_tokenizer(monkeypatch, model_file, tokenizer_type):
    monkeypatch.setattr(hugging_face, "find_spec", lambda name: name)
    build_tokenizer.cache_clear()
    asked = []

    def build(args):
        asked.append((args.tokenizer_type, args.tokenizer_model, args.trust_remote_code))
        return SimpleNamespace(vocab_size=100)

    monkeypatch.setattr(load.megatron_builder, "build_tokenizer", build)
    load.tokenizer_of(stored_run("folder", 128, tokenizer_type=tokenizer_type, trust_remote_code=True), model_file)
    assert asked == [(tokenizer_type, str(model_file or "folder"), False)]
    build_tokenizer.cache_clear()


@pytest.fixture
def folder(tmp_path):
    pytest.importorskip("transformers", reason="needs the package transformers")
    return write_tokenizer(tmp_path / "bpe", ["def f(x):\n    return x\n"], eos_token=END)


def test_hugging_face_tokenizer_reads_texts_and_prompts(folder, tmp_path):
    size = load.tokenizer_of(stored_run(folder, 384), None).vocab_size
    assert 256 < size <= 384
    build_tokenizer.cache_clear()
    moved = folder.rename(tmp_path / "moved")
    with pytest.raises(UsageError, match=r"needs --tokenizer-model, .* on the hub; .*bpe does not exist"):
        load.tokenizer_of(stored_run(folder, 384), None)
    tokenizer = load.tokenizer_of(stored_run(folder, 384), moved)
    ids = prompt_ids(tokenizer, "return x", 100)
    assert tokenizer.detokenize(ids) == "return x"
    (tmp_path / "data.jsonl").write_text('{"text": "return x"}\n{"text": "x"}\n')
    end, x = tokenizer.eod, *prompt_ids(tokenizer, "x", 100)
    assert read_stream(str(tmp_path / "data.jsonl"), tokenizer).tokens.tolist() == [end, *ids, end, x, end]
    with pytest.raises(UsageError, match=rf"the tokenizer has {size} ids, 384 when padded"):
        load.tokenizer_of(stored_run(moved, 512), None)
    # Weights of a Hugging Face folder have its vocabulary, which may be larger than the tokenizer's in any way.
    assert load.tokenizer_of(stored_run(moved, 512, lancet_from_hf="folder"), None).vocab_size == size
    with pytest.raises(UsageError, match=rf"the tokenizer has {size} ids"):
        load.tokenizer_of(stored_run(moved, 256, lancet_from_hf="folder"), None)
