"""The flags of Hugging Face weights where Megatron-Bridge is not installed."""

import sys

import pytest

from megatron_lancet.errors import UsageError
from megatron_lancet.features.hugging_face import source
from megatron_lancet.registry import features
from megatron_lancet.training.arguments import parse


@pytest.fixture
def folder(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.mark.parametrize("flag", ["--lancet-from-hf", "--lancet-from-hf="])
def test_missing_bridge_is_one_line(monkeypatch, folder, flag):
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    words = [f"{flag}{folder}"] if flag.endswith("=") else [flag, str(folder)]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py", *words])
    with pytest.raises(UsageError, match=r"needs Megatron-Bridge, .* not installed: pip install --no-deps megatron-"):
        parse(features())


def test_run_without_the_flags_needs_no_bridge(monkeypatch):
    monkeypatch.setattr(source, "find_spec", lambda name: pytest.fail("it looked for Bridge"))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py"])
    args, _ = parse(features())
    assert (args.lancet_from_hf, args.lancet_save_hf, args.num_layers) == (None, None, None)
