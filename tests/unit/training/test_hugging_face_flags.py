"""The flags of Hugging Face weights where Megatron-Bridge is not installed, and which folders a run writes."""

import sys
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest
from megatron.training import training

from megatron_lancet.errors import UsageError
from megatron_lancet.features.hugging_face import feature, source
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


@pytest.mark.parametrize(
    ("exit_status", "last", "steps"),
    [
        (None, 5, [3, 5]),
        (None, 6, [3, 6]),  # the last step is one of --iterations-to-skip
        (None, 3, [3]),  # saved by Megatron
        (0, 5, [3, 5]),
        (16, 5, [3]),  # step 5 had no finite loss and changed no weight
    ],
)
def test_last_weights_have_the_number_of_the_last_step(tmp_path, monkeypatch, exit_status, last, steps):
    args = SimpleNamespace(iteration=0, curr_iteration=min(last, 5) - 1)

    def train():
        training.save_checkpoint(3)
        if exit_status is not None:
            raise SystemExit(exit_status)
        return last, 0

    written = []
    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(training, "save_checkpoint", lambda iteration: None)
    monkeypatch.setattr(feature, "get_args", lambda: args)
    monkeypatch.setattr(feature, "save", lambda source, stages, target: written.append(target))
    with ExitStack() as stack:
        feature.ActiveHuggingFace(None, tmp_path).enter(stack)
        with suppress(SystemExit):
            training.train()
    assert written == [tmp_path / f"iter_000000{step}" for step in steps]
