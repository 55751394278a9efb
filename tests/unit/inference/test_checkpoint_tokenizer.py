"""The tokenizer of a checkpoint, whose arguments somebody else may have written."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_lancet.inference import load
from megatron_lancet.inference.checkpoint_reader import StoredRun


@pytest.mark.parametrize("model_file", [None, Path("elsewhere")])
def test_trust_remote_code_is_not_passed_to_the_tokenizer(monkeypatch, model_file):
    asked = []

    def build_tokenizer(args):
        asked.append((args.tokenizer_type, args.tokenizer_model, args.trust_remote_code))
        return SimpleNamespace(vocab_size=100)

    monkeypatch.setattr(load.megatron_builder, "build_tokenizer", build_tokenizer)
    arguments = argparse.Namespace(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model="folder",
        trust_remote_code=True,
        padded_vocab_size=128,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=1,
    )
    load.tokenizer_of(StoredRun(Path("checkpoint"), 1, arguments, None), model_file)
    assert asked == [("HuggingFaceTokenizer", str(model_file or "folder"), False)]
